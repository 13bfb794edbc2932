"""Check the inputs of a study before it gets a folder: models, devices, policies, the cluster file.

A missing input would otherwise make every part fail in turn. Data and weights are checked by `training_recipe`.
"""

from __future__ import annotations

from stagewright.errors import UsageError
from stagewright.studies.framework.study import Study


def check_study_inputs(study: Study) -> None:
    """Raise UsageError if something that the study's options name does not exist on this machine."""
    from stagewright.cluster.file import read_cluster
    from stagewright.partition.registry import find_policy
    from stagewright.spec.local_check import check_devices
    from stagewright.zoo.blueprint import Options
    from stagewright.zoo.validation import check_model

    chosen = study.options
    sizes = Options(image_size=chosen.get("image_size"), sequence_length=chosen.get("sequence_length"))
    for key in ("model", "bucket_model"):
        if chosen.get(key) is not None:
            check_model(chosen[key], None, sizes if key == "model" else Options())
    for seed in chosen.get("seeds") or ([chosen["seed"]] if "seed" in chosen else []):
        if not 0 <= seed < 2**32:
            raise UsageError(f"--seed {seed}: must be from 0 to {2**32 - 1}")
    check_devices(tuple(chosen.get("devices") or ()))
    for name in chosen.get("policies") or ():
        find_policy(name)
    if chosen.get("cluster") is not None:
        try:
            read_cluster(chosen["cluster"])
        except UsageError as error:
            raise UsageError(f"--cluster: {error}") from None
