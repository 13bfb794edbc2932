"""The batch layout of the example: its batch dimension, and the example resized to another batch size.

Most models have the batch first in every input, some (``nn.LSTM``, ``nn.Transformer``) second. If neither works, the
batch size is fixed. Later inputs are checked against the example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stagewright import structure
from stagewright.errors import UsageError
from stagewright.graph.symbolic_shapes import is_constant

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """The batch dimension of the flattened inputs."""

    dim: int
    batch_size: int
    """Samples in the example."""
    leaves: tuple[int, ...]
    """Indices of the inputs that have this dimension."""

    def size_of(self, leaves: Sequence[Any]) -> Any:
        """Return the batch size (or its symbol) of flattened inputs."""
        return leaves[self.leaves[0]].shape[self.dim]

    def sizes_of(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the batch size (or its symbol) of every flattened input that has one."""
        return [leaves[index].shape[self.dim] for index in self.leaves]

    def resized(self, arguments: Arguments, batch_size: int) -> Arguments:
        """Resize the inputs to another number of samples, repeating the first ones."""
        leaves, spec = structure.flatten(arguments)
        for index in self.leaves:
            tensor = leaves[index]
            samples = torch.arange(batch_size, device=tensor.device) % tensor.shape[self.dim]
            leaves[index] = tensor.detach().index_select(self.dim, samples)
        resized: Arguments = spec.unflatten(leaves)
        return resized

    def dynamic_shapes(self, arguments: Arguments) -> list[Any]:
        """Return the ``dynamic_shapes`` of ``torch.export`` for the flattened inputs."""
        auto = torch.export.Dim.AUTO
        num_leaves = len(structure.leaves(arguments))
        return [{self.dim: auto} if index in self.leaves else None for index in range(num_leaves)]


def normalize_arguments(args: Any, kwargs: Mapping[str, Any] | None) -> Arguments:
    """Convert a tuple, a tensor or a mapping of keyword arguments to ``(args, kwargs)``."""
    if isinstance(args, Mapping) and kwargs is None:
        return (), dict(args)
    if isinstance(args, (tuple, list)):
        return tuple(args), dict(kwargs or {})
    return (args,), dict(kwargs or {})


def guess_batch_dims(model: nn.Module) -> tuple[int, ...]:
    """Return the likely batch dimensions: 1 first if the model has ``batch_first=False``, else 0 first."""
    flags = {module.batch_first for module in model.modules() if isinstance(getattr(module, "batch_first", None), bool)}
    return (1, 0) if flags == {False} else (0, 1)


def candidate_layouts(arguments: Arguments, dims: Sequence[int]) -> list[BatchLayout]:
    """Return the possible layouts, most likely first."""
    leaves = structure.leaves(arguments)
    tensors = [(index, leaf) for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise UsageError(
            "the example contains no tensor; give the arguments of one forward call, as in capture(model, (x,))"
        )
    if any(tensor.numel() == 0 for _, tensor in tensors):
        raise UsageError("the example contains an empty tensor; give at least one sample")
    layouts = []
    for dim in dims:
        sizes = [tensor.shape[dim] for _, tensor in tensors if tensor.ndim > dim]
        if sizes:
            batched = tuple(index for index, tensor in tensors if tensor.ndim > dim and tensor.shape[dim] == sizes[0])
            layouts.append(BatchLayout(dim=dim, batch_size=int(sizes[0]), leaves=batched))
    return layouts


def check_input(index: int, leaf: Any, example: Any) -> None:
    """Check one input against the traced one: only the batch size may differ."""
    if not isinstance(example, torch.Tensor):
        if type(leaf) is not type(example) or leaf != example:
            raise UsageError(
                f"input {index} was {example!r} at capture but is {leaf!r} now; capture again with the new value"
            )
        return
    if not isinstance(leaf, torch.Tensor):
        raise UsageError(f"input {index} was a tensor at capture but is {type(leaf).__name__} now")
    shape = [int(size) if is_constant(size) else "batch" for size in example.shape]
    matches = leaf.ndim == len(shape) and all(
        expected in ("batch", size) for size, expected in zip(leaf.shape, shape, strict=True)
    )
    if not matches or leaf.dtype != example.dtype:
        raise UsageError(
            f"input {index} has shape {list(leaf.shape)} and dtype {leaf.dtype}, but the graph was captured for "
            f"{shape} and {example.dtype}; capture again with an example of the new shape"
        )


def outline(leaves: Sequence[Any]) -> str:
    """Describe flat arguments for an error message."""
    parts = [f"tensor{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
    return "(" + ", ".join(parts) + ")"
