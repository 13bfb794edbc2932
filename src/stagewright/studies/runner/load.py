"""Build a study from its name and options.

Each study is a package with two modules that are read here:

    options.py    Options: a frozen dataclass of plain values, whose defaults are the full size
    study.py      build_study: Options -> Study
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from stagewright.errors import UnknownName, UsageError
from stagewright.studies.framework.options import gpu_values, quick_values
from stagewright.studies.framework.study import Study
from stagewright.studies.runner.folder import StudyFolder

STUDIES = ("stages", "strategies", "codecs", "memory", "fabric")


def options_class(name: str) -> Any:
    """The Options class of a study."""
    if name not in STUDIES:
        raise UnknownName("study", name, STUDIES)
    return import_module(f"stagewright.studies.{name}.options").Options


def choose_study(name: str, given: Mapping[str, Any], *, quick: bool) -> Study:
    """Build a study with the given options; those that are None take the full-size or quick defaults."""
    options = options_class(name)
    on_gpus = any(str(device).startswith("cuda") for device in given.get("devices") or ())
    defaults = {"quick": True, **quick_values(options)} if quick else gpu_values(options) if on_gpus else {}
    return load_study(name, {**defaults, **{key: value for key, value in given.items() if value is not None}})


def load_study(name: str, options: Mapping[str, Any]) -> Study:
    """Build a study with all its options, as study.json holds them."""
    study: Study = import_module(f"stagewright.studies.{name}.study").build_study(read_options(name, options))
    return study


def read_options(name: str, options: Mapping[str, Any]) -> Any:
    """Build the options of a study from those in study.json."""
    try:
        return options_class(name)(**{key: _as_tuple(value) for key, value in options.items()})
    except TypeError as error:
        raise UsageError(f"these are not options of this version of the study {name!r}: {error}") from None


def load_study_of_folder(folder: StudyFolder) -> Study:
    """Build the study whose folder this is."""
    about = folder.about()
    return load_study(str(about["study"]), about["options"])


def _as_tuple(value: Any) -> Any:
    """Turn lists, as JSON has them, into tuples."""
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value
