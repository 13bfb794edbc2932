"""What a named model is made of before it is built: options in, class and configuration out.

`vision.py`, `language.py` and `mlp.py` write blueprints; `loading.py` builds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from stagewright.errors import UsageError
from stagewright.zoo.model import ModelInput, Objective

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user may choose about a model; None means the model's own default."""

    image_size: int | None = None
    """Height and width of images, in pixels."""
    sequence_length: int | None = None
    """Tokens in a sequence."""
    num_classes: int | None = None
    """Outputs of a classifier."""
    padded: bool | None = None
    """Whether example sequences differ in length and come with an attention mask."""

    def __post_init__(self) -> None:
        for name in ("image_size", "sequence_length", "num_classes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")

    def given(self) -> list[str]:
        """Names of the options that the user set."""
        return [one.name for one in fields(self) if getattr(self, one.name) is not None]

    def refuse_others(self, model: str, allowed: frozenset[str]) -> None:
        """UsageError where an option was set that means nothing to `model`."""
        for name in self.given():
            if name not in allowed:
                takes = ", ".join(sorted(allowed)) or "none"
                raise UsageError(f"the model {model!r} takes no {name} (options that it takes: {takes})")


def no_changes(module: nn.Module) -> tuple[str, ...]:
    """The default of `Blueprint.adjust`."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """How to build one model."""

    make: Callable[[Any], nn.Module]
    """Builds the module from `config`: a transformers model class, or any function."""
    config: Any
    """The transformers configuration; None for a module that has none."""
    inputs: ModelInput
    """What the model is fed."""
    objective: Objective
    """What its loss trains."""
    num_classes: int | None
    """Outputs of a classifier; None for the next token."""
    pad_token: int = 0
    """Token id that fills padded sequences."""
    adjust: Callable[[nn.Module], tuple[str, ...]] = no_changes
    """Changes a module after it is built or loaded; returns notes for the user."""
