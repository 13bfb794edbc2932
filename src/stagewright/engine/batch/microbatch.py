"""How a batch is dealt out: first over the replicas of the data axis, then into micro-batches.

    batch of 10, data = 2, 2 micro-batches each

    sample      0   1   2   3   4 │ 5   6   7   8   9
    replica     ──────── 0 ────── │ ──────── 1 ──────
    micro-batch ─── 0 ─── ── 1 ── │ ─── 0 ─── ── 1 ──

Sizes follow ``torch.tensor_split``: they differ by one at most and the larger ones come first. Fewer samples than
micro-batches make fewer micro-batches, never an empty one. A loss is a mean over samples, so that each micro-batch
weighs ``n_i / B``: the weighted means add up to the mean over the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from stagewright.errors import UsageError
from stagewright.graph.symbols import batch_dim

if TYPE_CHECKING:
    from stagewright.graph.unit_graph import UnitGraph

__all__ = [
    "Microbatch",
    "batch_dims",
    "batch_dims_of",
    "leading_dims",
    "microbatch_sizes",
    "microbatches",
    "narrow",
    "narrower",
    "shares",
    "split",
    "weights",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One chunk of one replica's share of a batch."""

    index: int
    """Place in the replica's order, from 0."""
    first_sample: int
    """Its first sample, counted in the whole batch of all replicas."""
    num_samples: int
    """Samples in it."""
    weight: float
    """Its part of the whole batch of all replicas; the weights of all micro-batches of all replicas add up to 1."""


def shares(batch: int, data: int) -> tuple[int, ...]:
    """Samples of each replica; with fewer samples than replicas, the last ones get none."""
    if batch < 1 or data < 1:
        raise UsageError(f"a batch of {batch} samples can't be shared by {data} replicas; both must be at least 1")
    small, larger = divmod(batch, data)
    return (small + 1,) * larger + (small,) * (data - larger)


def microbatch_sizes(samples: int, num_microbatches: int) -> tuple[int, ...]:
    """Samples of each micro-batch; with fewer samples than asked for micro-batches, one each."""
    if num_microbatches < 1:
        raise UsageError(f"{num_microbatches} micro-batches asked for; there must be at least 1")
    return shares(samples, min(samples, num_microbatches)) if samples else ()


def microbatches(batch: int, num_microbatches: int, *, data: int = 1, replica: int = 0) -> tuple[Microbatch, ...]:
    """The micro-batches of one replica."""
    sizes = shares(batch, data)
    first = sum(sizes[:replica])
    found: list[Microbatch] = []
    for index, size in enumerate(microbatch_sizes(sizes[replica], num_microbatches)):
        found.append(Microbatch(index=index, first_sample=first, num_samples=size, weight=size / batch))
        first += size
    return tuple(found)


def weights(sizes: Sequence[int]) -> tuple[float, ...]:
    """What each part's mean weighs in the mean over all: its size over their sum."""
    total = sum(sizes)
    return tuple(size / total for size in sizes)


def batch_dims_of(graph: UnitGraph) -> tuple[int | None, ...]:
    """For each of a graph's flattened inputs, the dimension that grows with the batch, as capture saw it."""
    inputs = [node.meta.get("val") for node in graph.stage(0, 0).graph.nodes if node.op == "placeholder"]
    return tuple(batch_dim(one) if isinstance(one, torch.Tensor) else None for one in inputs)


def batch_dims(one: Any, other: Any) -> tuple[int | None, ...]:
    """The same for any structure, from two examples of it with different numbers of samples."""
    leaves, spec = pytree.tree_flatten(one)
    others, other_spec = pytree.tree_flatten(other)
    if spec != other_spec:
        raise UsageError(f"two example batches differ in structure: {spec} and {other_spec}")
    return tuple(_differing_dim(a, b) for a, b in zip(leaves, others, strict=True))


def leading_dims(value: Any, batch: int) -> tuple[int | None, ...]:
    """The same where only one example is known: the first dimension of every tensor that has ``batch`` rows."""
    return tuple(
        0 if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == batch else None
        for leaf in pytree.tree_leaves(value)
    )


def narrow(value: Any, dims: Sequence[int | None], *, batch: int, first: int, num: int) -> Any:
    """Samples ``first`` … ``first + num - 1`` of a structure that holds ``batch`` samples, as views.

    ``dims`` has one entry for each leaf; a leaf without a batch dimension is passed whole.
    """
    return narrower(value, dims, batch=batch)(first, num)


def narrower(value: Any, dims: Sequence[int | None], *, batch: int) -> Callable[[int, int], Any]:
    """``(first, num)`` to those samples of a structure, as ``narrow`` has them: for who takes many parts of one."""
    leaves, spec = pytree.tree_flatten(value)
    if len(leaves) != len(dims):
        raise UsageError(f"the batch has {len(leaves)} values, the example had {len(dims)}; give it the same structure")
    is_whole = all(dim is None for dim in dims) and any(_has_dims(leaf) for leaf in leaves)

    def take(first: int, num: int) -> Any:
        if num < batch and is_whole:
            raise UsageError(  # passed whole, each part would be the whole batch
                f"can't take {num} of {batch} samples: no dimension of the batch's tensors grows with their number "
                "(was the model captured for one batch size?); use 1 micro-batch and 1 replica"
            )
        taken = [
            leaf if dim is None else _narrowed(at, leaf, dim, batch, first, num)
            for at, (leaf, dim) in enumerate(zip(leaves, dims, strict=True))
        ]
        return pytree.tree_unflatten(taken, spec)

    return take


def split(value: Any, dims: Sequence[int | None], sizes: Sequence[int]) -> list[Any]:
    """A structure of ``sum(sizes)`` samples as one structure for each size."""
    batch, first = sum(sizes), 0
    parts = []
    take = narrower(value, dims, batch=batch)
    for size in sizes:
        parts.append(take(first, size))
        first += size
    return parts


def _has_dims(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0


def _narrowed(at: int, leaf: torch.Tensor, dim: int, batch: int, first: int, num: int) -> torch.Tensor:
    """A dimension may hold several rows of each sample, one sample after the other."""
    rows, rest = divmod(leaf.shape[dim], batch)
    if rest or not rows:
        raise UsageError(
            f"value {at} of the batch has shape {list(leaf.shape)}: its dimension {dim} should hold {batch} samples"
        )
    return leaf.narrow(dim, first * rows, num * rows)


def _differing_dim(one: Any, other: Any) -> int | None:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or one.ndim != other.ndim:
        return None
    return next((dim for dim in range(one.ndim) if one.shape[dim] != other.shape[dim]), None)
