"""A model that is not built yet: its class and configuration, chosen from the user's options.

`vision.py`, `language.py` and `mlp.py` create blueprints; `loading.py` builds the models.
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
    """The user's options for a model; None is the model's default."""

    image_size: int | None = None
    """Height and width of images, in pixels."""
    sequence_length: int | None = None
    """Tokens per sequence."""
    num_classes: int | None = None
    """Number of classes of a classifier."""
    padded: bool | None = None
    """Whether example sequences have different lengths and an attention mask."""

    def __post_init__(self) -> None:
        for name in ("image_size", "sequence_length", "num_classes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{name} must be an integer of at least 1, not {value!r}")

    def given(self) -> list[str]:
        """Return the names of the options that the user set."""
        return [option.name for option in fields(self) if getattr(self, option.name) is not None]

    def check_supported(self, model: str, allowed: frozenset[str]) -> None:
        """Raise UsageError if an option is set that `model` does not support."""
        for name in self.given():
            if name not in allowed:
                supported = ", ".join(sorted(allowed)) or "none"
                raise UsageError(f"the model {model!r} has no option {name} (its options: {supported})")


def no_changes(module: nn.Module) -> tuple[str, ...]:
    """Change nothing: the default of `Blueprint.adjust`."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """How to build a model."""

    make: Callable[[Any], nn.Module]
    """Build the module from `config`: a transformers model class, or any function."""
    config: Any
    """The transformers configuration, if any."""
    inputs: ModelInput
    objective: Objective
    num_classes: int | None
    """Number of classes of a classifier; None for next-token prediction."""
    pad_token: int = 0
    adjust: Callable[[nn.Module], tuple[str, ...]] = no_changes
    """Change a module after it is built or loaded; returns notes for the user."""
