"""Models of an analytic forecast: published configurations by name (models.toml), files, and plain dictionaries."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from stagewright.analytic.shape import TransformerShape
from stagewright.errors import UnknownName


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return published configurations by name."""
    return tomllib.loads(resources.files(__package__).joinpath("models.toml").read_text(encoding="utf-8"))


def load_shape(model: TransformerShape | Mapping[str, Any] | str | Path, length: int | None = None) -> TransformerShape:
    """Return the dimensions of a model.

    Args:
        model: A name such as ``gpt3-175b``, a folder with a config.json (also as ``hf:FOLDER``), the path of one, or
            a configuration as a dictionary.
        length: Sequence length; None: the longest that the configuration allows.
    """
    if isinstance(model, TransformerShape):
        return model.with_length(length)
    if isinstance(model, Mapping):
        return TransformerShape.from_config(dict(model), "the configuration", length)
    name = str(model).removeprefix("hf:")
    if name.lower() in known_models():
        return TransformerShape.from_config(known_models()[name.lower()], name, length)
    if not Path(name).expanduser().exists():
        raise UnknownName("model", name, known_models(), hint="or give a folder with a config.json")
    return TransformerShape.read(name, length)
