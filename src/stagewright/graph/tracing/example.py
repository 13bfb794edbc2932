"""The example batch: which dimension of which input is the batch's, and the same example at another size.

A *reading* says where the batch is. Most models have it first in every input; some (``nn.LSTM``, ``nn.Transformer``)
second; if neither works the batch size is fixed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from stagewright.errors import UsageError

__all__ = ["Arguments", "Reading", "as_arguments", "likely_dims", "readings"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Where the batch is in the flattened inputs."""

    dim: int
    """The batch's dimension."""
    batch_size: int
    """Samples in the example."""
    leaves: tuple[int, ...]
    """Positions of the inputs that have it."""

    def size_of(self, leaves: Sequence[Any]) -> Any:
        """The batch size (or its symbol) of flattened inputs."""
        return leaves[self.leaves[0]].shape[self.dim]

    def resized(self, arguments: Arguments, batch_size: int) -> Arguments:
        """The same inputs with another number of samples, the first ones repeated."""
        leaves, spec = pytree.tree_flatten(arguments)
        for at in self.leaves:
            index = torch.arange(batch_size, device=leaves[at].device) % leaves[at].shape[self.dim]
            leaves[at] = leaves[at].detach().index_select(self.dim, index)
        resized: Arguments = pytree.tree_unflatten(leaves, spec)
        return resized

    def dynamic_shapes(self, arguments: Arguments) -> Any:
        """What ``torch.export`` is told: these dimensions may vary."""
        leaves, spec = pytree.tree_flatten(arguments)
        auto = torch.export.Dim.AUTO
        shapes = [{self.dim: auto} if at in self.leaves else None for at in range(len(leaves))]
        return pytree.tree_unflatten(shapes, spec)


def as_arguments(args: Any, kwargs: Mapping[str, Any] | None) -> Arguments:
    """Accept a tuple, one tensor, or a mapping of keyword arguments."""
    if isinstance(args, Mapping) and kwargs is None:
        return (), dict(args)
    if isinstance(args, (tuple, list)):
        return tuple(args), dict(kwargs or {})
    return (args,), dict(kwargs or {})


def likely_dims(model: nn.Module) -> tuple[int, ...]:
    """In which dimension the batch probably is: second if the model says so (``batch_first=False``), else first."""
    said = {module.batch_first for module in model.modules() if isinstance(getattr(module, "batch_first", None), bool)}
    return (1, 0) if said == {False} else (0, 1)


def readings(arguments: Arguments, dims: Sequence[int]) -> list[Reading]:
    """Where the batch may be, the likeliest first."""
    leaves = pytree.tree_leaves(arguments)
    tensors = [(at, leaf) for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise UsageError(
            "the example holds no tensor; give the arguments of one forward call, as in capture(model, (x,))"
        )
    if any(tensor.numel() == 0 for _, tensor in tensors):
        raise UsageError("the example holds an empty tensor; give at least one sample")
    found = []
    for dim in dims:
        sizes = [tensor.shape[dim] for _, tensor in tensors if tensor.ndim > dim]
        if sizes:
            same = tuple(at for at, tensor in tensors if tensor.ndim > dim and tensor.shape[dim] == sizes[0])
            found.append(Reading(dim=dim, batch_size=int(sizes[0]), leaves=same))
    return found
