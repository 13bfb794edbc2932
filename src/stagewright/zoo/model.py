"""What the rest of the house calls a model: an `nn.Module` with an example batch, a loss and a name.

Values only. Nothing here imports torch at run time, so that listing names stays cheap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

Loss: TypeAlias = "Callable[[Any, Any], torch.Tensor]"
"""`loss(output, target)` is a scalar, the mean over the samples of a batch."""

Objective: TypeAlias = Literal["classify", "next-token", "none"]

LossSource: TypeAlias = Literal["given", "model", "stand-in"]
"""Whose loss is used: the user's, the model's own, or neither."""

LOSS_NOTES: dict[LossSource, str] = {
    "model": "no loss given: the model's own is used, the scalar 'loss' that it returns",
    "stand-in": "no loss given, and the model returns none: its outputs' distance from fixed numbers stands in",
}
"""What to tell of a loss that nobody gave."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One batch as a model takes it: `model(*args, **kwargs)`, and what the loss compares the output with."""

    args: tuple[Any, ...] = ()
    """Positional arguments of the module."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the module."""
    target: Any = None
    """Second argument of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """A model that takes images: how a task must prepare them."""

    channels: int = 3
    """1 for grey, 3 for colour."""
    size: int = 224
    """Height and width in pixels."""
    mean: tuple[float, ...] = (0.5,)
    """Subtracted from pixels in 0..1; one number for each channel, or one for all."""
    std: tuple[float, ...] = (0.5,)
    """Divides after the mean is taken off."""
    flatten: bool = False
    """Whether each image is given as one flat vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextInput:
    """A model that takes token ids: how a task must prepare them."""

    vocabulary_size: int
    """Ids are below this."""
    sequence_length: int = 128
    """Every sequence is cut or padded to this many tokens."""
    num_token_types: int = 1
    """More than 1: the model tells first and second sentence apart by `token_type_ids`."""
    tokenizer: Path | None = None
    """A folder with the tokenizer's files; None where none came with the model."""


ModelInput: TypeAlias = ImageInput | TextInput


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """An `nn.Module` with an example batch, a loss and a name."""

    name: str
    """What the user typed."""
    module: nn.Module
    """The module, on the CPU; named models are in training mode, as every fresh module is."""
    args: tuple[Any, ...]
    """Positional arguments of the example batch."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the example batch."""
    target: Any = None
    """What `loss` compares the output of the example batch with."""
    loss: Loss
    """`loss(output, target)`, a scalar."""
    batch_size: int
    """Number of samples in the example batch."""
    make_example: Callable[[int], Batch]
    """Makes the example batch at another size; called through `example`."""
    description: str = ""
    """One line for lists."""
    notes: tuple[str, ...] = ()
    """What the user should know about how the model was made, e.g. a newly initialised head."""
    objective: Objective = "none"
    """What the loss trains: a class for each sample, the next token, or nothing in particular."""
    num_classes: int | None = None
    """Number of classes of a classifier."""
    inputs: ModelInput | None = None
    """What a task must feed; None where only the example is known."""

    def example(self, batch_size: int) -> Batch:
        """The example batch with `batch_size` samples; the same numbers at every call."""
        return self.make_example(batch_size)

    def to(self, place: torch.device, room_bytes: int | None = None) -> Model:
        """The model with its module and its example on a device; the module itself moves.

        Parameters for which the device (or ``room_bytes`` of it) has no room stay on the host: see ``cluster.hosted``.
        """
        if place.type == "cpu":
            return self
        from torch.utils import _pytree as pytree

        from stagewright.machine.cpu_offload import settle

        def moved(value: Any) -> Any:
            return pytree.tree_map(lambda leaf: leaf.to(place) if hasattr(leaf, "to") else leaf, value)

        def example(batch_size: int) -> Batch:
            one = self.make_example(batch_size)
            return Batch(args=moved(one.args), kwargs=moved(one.kwargs), target=moved(one.target))

        return replace(
            self,
            module=settle(self.module, place, room_bytes),
            args=moved(self.args),
            kwargs=moved(self.kwargs),
            target=moved(self.target),
            make_example=example,
        )
