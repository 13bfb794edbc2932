"""Check the inputs of a study before it gets a folder: models, devices, policies, the cluster file.

A missing input would otherwise make one part after the other fail. Data and weights are checked by `training_recipe`.
"""

from __future__ import annotations

from stagewright.errors import UsageError
from stagewright.studies.framework.study import Study


def check_study_inputs(study: Study) -> None:
    """Raise UsageError if something that the study's options name does not exist on this machine."""
    from stagewright.cluster.device import check_devices
    from stagewright.cluster.file import read_cluster
    from stagewright.partition.registry import find_policy
    from stagewright.zoo.blueprint import Options
    from stagewright.zoo.validation import check_model

    chosen = study.options
    sizes = Options(image_size=chosen.get("image_size"), sequence_length=chosen.get("sequence_length"))
    for key in ("model", "bucket_model", "contrast"):
        if chosen.get(key) not in (None, "", "none"):
            check_model(chosen[key], None, sizes if key == "model" else Options())
    for seed in chosen.get("seeds") or ([chosen["seed"]] if "seed" in chosen else []):
        if not 0 <= seed < 2**32:
            raise UsageError(f"--seed {seed}: must be from 0 to {2**32 - 1}")
    _check_memory(study)
    check_devices(tuple(chosen.get("devices") or ()))
    for name in chosen.get("policies") or ():
        find_policy(name)
    if chosen.get("cluster") is not None:
        try:
            read_cluster(chosen["cluster"])
        except UsageError as error:
            raise UsageError(f"--cluster: {error}") from None


def _check_memory(study: Study) -> None:
    """Refuse a memory limit that not even half of the smallest model's weights and gradients fit into."""
    limit = study.options.get("memory_bytes")
    if limit is None:
        return
    from stagewright.quantity import format_bytes
    from stagewright.spec.plan import ModelSpec

    if study.name == "memory":
        spec = ModelSpec(name="gpt-layers:1", sequence_length=study.options["sequence_length"])
    else:
        from stagewright.studies.runner.load import read_options

        chosen = read_options(study.name, study.options)
        spec = chosen.recipe(chosen.tasks[0]).model_spec(0)
    model = spec.load(batch=2)
    # Two devices share them at best: half of the weights and half of the gradients on each.
    needed = sum(value.numel() * value.element_size() for value in model.module.parameters())
    if limit < needed:
        raise UsageError(
            f"--memory {format_bytes(limit)}: no strategy fits {spec.name!r}, the study's smallest model, into it on "
            f"two devices: half of its weights and gradients take {format_bytes(needed)}, and activations come on top; "
            "use more than that"
        )
