"""From a study's name and options to the study.

Each study is a module of this package with three names:

    Options     a frozen dataclass of plain values; its defaults are the full size
    QUICK       the defaults that --quick has instead
    study       Options -> Study

and, where sizes that suit cores are too small for GPUs, ON_GPUS: the defaults that the full size has there instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from stagewright.errors import UnknownName, UsageError
from stagewright.studies.runner.folder import StudyFolder
from stagewright.studies.framework.study import Study

__all__ = ["STUDIES", "choose_study", "default_devices_of_study", "load_study", "study_of_folder"]

STUDIES = ("stages", "strategies", "codecs", "memory", "fabric")


def choose_study(name: str, given: Mapping[str, Any], *, quick: bool) -> Study:
    """A study with the options that were given; what is None is left to the defaults, full or quick."""
    module = _module(name)
    on_gpus = any(str(device).startswith("cuda") for device in given.get("devices") or ())
    defaults = {"quick": True, **module.QUICK} if quick else getattr(module, "ON_GPUS", {}) if on_gpus else {}
    return load_study(name, {**defaults, **{key: value for key, value in given.items() if value is not None}})


def load_study(name: str, options: Mapping[str, Any]) -> Study:
    """A study with all its options, as study.json has them."""
    module = _module(name)
    try:
        chosen = module.Options(**{key: _plain(value) for key, value in options.items()})
    except TypeError as error:
        raise UsageError(f"these are not options of the study {name!r}, or of another version of it: {error}") from None
    made: Study = module.study(chosen)
    return made


def study_of_folder(folder: StudyFolder) -> Study:
    """The study that a folder is of."""
    about = folder.about()
    return load_study(str(about["study"]), about["options"])


def default_devices_of_study(most: int) -> tuple[str, ...]:
    """The devices of a study that names none: GPUs where there are two or more, else cores; at most so many."""
    import torch

    from stagewright.machine.machine import separate_cores

    if torch.cuda.is_available() and torch.cuda.device_count() >= 2:
        return tuple(f"cuda:{index}" for index in range(min(most, torch.cuda.device_count())))
    return tuple(f"cpu:{core}" for core in separate_cores()[:most])


def _module(name: str) -> Any:
    if name not in STUDIES:
        raise UnknownName("study", name, STUDIES)
    return import_module(f"stagewright.studies.{name}.study")


def _plain(value: Any) -> Any:
    """Lists of JSON are tuples of a frozen value."""
    return tuple(_plain(one) for one in value) if isinstance(value, list) else value
