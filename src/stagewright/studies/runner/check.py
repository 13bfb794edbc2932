"""What a study names that must be on this machine: models, devices, policies, a cluster's file.

Asked before the study has a folder: a part that fails for want of a name would fail again in every other part. Data and
weights are looked for where a lesson is chosen (``lesson.py``).
"""

from __future__ import annotations

from stagewright.errors import UsageError
from stagewright.studies.framework.study import Study

__all__ = ["check_study"]


def check_study(study: Study) -> None:
    """UsageError where something that its options name is not to be had here."""
    from stagewright.partition.registry import find_policy
    from stagewright.spec.local_check import check_devices
    from stagewright.zoo.blueprint import Options
    from stagewright.zoo.check import check_model

    asked = study.options
    sizes = Options(image_size=asked.get("image_size"), sequence_length=asked.get("sequence_length"))
    for key in ("model", "bucket_model"):
        if asked.get(key) is not None:
            check_model(asked[key], None, sizes if key == "model" else Options())
    for seed in asked.get("seeds") or ([asked["seed"]] if "seed" in asked else []):
        if not 0 <= seed < 2**32:
            raise UsageError(f"--seed {seed}: must be from 0 to {2**32 - 1}")
    check_devices(tuple(asked.get("devices") or ()))
    for name in asked.get("policies") or ():
        find_policy(name)
    if asked.get("cluster") is not None:
        _check_cluster(asked["cluster"])


def _check_cluster(path: str) -> None:
    from stagewright.cluster.file import read_cluster

    try:
        read_cluster(path)
    except UsageError as error:
        raise UsageError(f"--cluster: {error}") from None
