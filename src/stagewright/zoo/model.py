"""A model: an `nn.Module` with an example batch, a loss and a name.

Nothing here imports torch at run time, so that listing names is fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from stagewright.zoo.weight_files import WeightFiles

Loss: TypeAlias = "Callable[[Any, Any], torch.Tensor]"
"""`loss(output, target)` is a scalar, the mean over the samples of a batch."""

Objective: TypeAlias = Literal["classify", "next-token", "none"]

LossSource: TypeAlias = Literal["given", "model", "stand-in"]
"""Origin of the loss: the user, the model's output, or a surrogate."""

LOSS_NOTES: dict[LossSource, str] = {
    "model": "no loss given: using the loss that the model returns",
    "stand-in": "no loss given, and the model returns none: using the outputs' distance from fixed numbers",
}
"""Notes about a loss that the user did not give."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """A batch: `loss(model(*args, **kwargs), target)`."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """Image inputs of a model: how a task must prepare them."""

    channels: int = 3
    """1 for gray, 3 for color."""
    size: int = 224
    """Height and width in pixels."""
    mean: tuple[float, ...] = (0.5,)
    """Mean of pixels in 0..1, per channel or for all."""
    std: tuple[float, ...] = (0.5,)
    """Standard deviation, per channel or for all."""
    flatten: bool = False
    """Whether each image is a flat vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextInput:
    """Text inputs of a model: how a task must prepare token ids."""

    vocabulary_size: int
    sequence_length: int = 128
    """Every sequence is truncated or padded to this many tokens."""
    num_token_types: int = 1
    """More than 1: `token_type_ids` distinguish the first and the second sentence."""
    tokenizer: Path | None = None
    """A folder with the tokenizer's files; None if the model comes without."""


ModelInput: TypeAlias = ImageInput | TextInput


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """An `nn.Module` with an example batch, a loss and a name."""

    name: str
    """The name as the user typed it."""
    module: nn.Module
    """The module, on the CPU; built-in models are in train mode, like every new module."""
    args: tuple[Any, ...]
    """Positional arguments of the example batch."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the example batch."""
    target: Any = None
    """Target of the example batch."""
    loss: Loss
    """`loss(output, target)`, a scalar."""
    batch_size: int
    """Number of samples in the example batch."""
    make_example: Callable[[int], Batch]
    """Make the example batch at another size; called by `example`."""
    description: str = ""
    """One line for lists."""
    notes: tuple[str, ...] = ()
    """Remarks for the user, such as a newly initialized head."""
    objective: Objective = "none"
    """Classification, next-token prediction, or unknown."""
    num_classes: int | None = None
    """Number of classes of a classifier."""
    inputs: ModelInput | None = None
    """The inputs that a task must prepare; None if only the example is known."""
    weights: WeightFiles | None = None
    """The files of the weights of a hollow model; None if the module holds its weights."""

    def example(self, batch_size: int) -> Batch:
        """Return the example batch with `batch_size` samples; the same values at every call."""
        return self.make_example(batch_size)

    def to(self, device: torch.device, room_bytes: int | None = None) -> Model:
        """Move the module (in place) and the example to a device.

        Parameters that do not fit on the device (or in ``room_bytes``) are offloaded: see ``machine.cpu_offload``.
        """
        if device.type == "cpu":
            return self
        from stagewright import structure
        from stagewright.machine.cpu_offload import move_or_offload
        from stagewright.machine.hollow import make_hollow

        def move(value: Any) -> Any:
            return structure.map_leaves(lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf, value)

        def example(batch_size: int) -> Batch:
            batch = self.make_example(batch_size)
            return Batch(args=move(batch.args), kwargs=move(batch.kwargs), target=move(batch.target))

        if self.weights is None:
            module = move_or_offload(self.module, device, room_bytes)
        else:
            module = make_hollow(self.module, device=device).to(device)
        return replace(
            self,
            module=module,
            args=move(self.args),
            kwargs=move(self.kwargs),
            target=move(self.target),
            make_example=example,
        )
