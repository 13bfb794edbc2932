"""Micro-batches: a batch is split over the data-parallel replicas first, then into micro-batches.

    batch of 10, data = 2, 2 micro-batches each

    sample      0   1   2   3   4 │ 5   6   7   8   9
    replica     ──────── 0 ────── │ ──────── 1 ──────
    micro-batch ─── 0 ─── ── 1 ── │ ─── 0 ─── ── 1 ──

Sizes follow ``torch.tensor_split``: they differ by at most one and the larger ones come first; replicas on devices of
different speeds get samples in proportion (``spec/unequal_devices.py``). A batch with fewer samples than micro-batches
has fewer micro-batches, never an empty one. A loss is a mean over samples, so micro-batch i
has weight ``n_i / B``: the weighted means add up to the mean over the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stagewright.errors import UsageError
from stagewright.sample_lists import BatchDims
from stagewright.spec.unequal_devices import split_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch of one data-parallel replica."""

    num_samples: int
    weight: float
    """Fraction of the global batch; the weights of all micro-batches of all replicas add up to 1."""
    first_sample: int = 0
    """Index of the first sample in the global batch."""
    replica: int = 0
    variant: int = 0
    """Number of the captured graph for the shapes of its inputs."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    inputs: Sequence[Any] = ()
    """``args`` and ``kwargs`` flattened into the inputs of the first stage; set before a pipeline runs it."""

    @property
    def size(self) -> tuple[int, int]:
        """What determines the shapes of its crossing tensors: the graph and the number of samples."""
        return self.variant, self.num_samples


def microbatch_sizes(num_samples: int, num_microbatches: int) -> tuple[int, ...]:
    """Return the number of samples in each micro-batch, without empty micro-batches."""
    if num_microbatches < 1:
        raise UsageError(f"the number of micro-batches is {num_microbatches}; it must be at least 1")
    return split_sizes(num_samples, min(num_samples, num_microbatches)) if num_samples else ()


def microbatch_layout(num_microbatches: int, replica_sizes: Sequence[int], replica: int = 0) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of one replica, without their tensors; ``replica_sizes``: samples of each."""
    num_samples, first = sum(replica_sizes), sum(replica_sizes[:replica])
    layout: list[MicroBatch] = []
    for size in microbatch_sizes(replica_sizes[replica], num_microbatches):
        layout.append(MicroBatch(num_samples=size, weight=size / num_samples, first_sample=first, replica=replica))
        first += size
    return tuple(layout)


def make_slicer(value: Any, dims: BatchDims, *, batch: int) -> Callable[[int, int], Any]:
    """Return ``slice_samples(first, num)``, which slices samples out of a structure of ``batch`` samples, as views.

    A leaf without a batch dimension is passed whole.
    """
    leaves, spec = dims.flatten(value)
    has_no_batch_dim = all(dim is None for dim in dims.dims) and any(
        isinstance(leaf, torch.Tensor) and leaf.ndim for leaf in leaves
    )

    def slice_samples(first: int, num: int) -> Any:
        if num < batch and has_no_batch_dim:
            raise UsageError(  # otherwise every micro-batch would be the whole batch
                f"can't take {num} of {batch} samples: no dimension of the batch's tensors grows with their number "
                "(was the model captured for one batch size?); use 1 micro-batch and 1 replica"
            )
        slices = [
            leaf if dim is None else _narrow(index, leaf, dim, batch, first, num)
            for index, (leaf, dim) in enumerate(zip(leaves, dims.dims, strict=True))
        ]
        return spec.unflatten(slices)

    return slice_samples


def _narrow(index: int, leaf: Any, dim: int, batch: int, first: int, num: int) -> Any:
    """Slice a tensor or a list of samples; the batch dimension may hold several consecutive rows per sample."""
    if isinstance(leaf, list):
        if len(leaf) != batch:
            raise UsageError(
                f"value {index} of the batch is a list of {len(leaf)} items; it should hold {batch} samples"
            )
        return leaf[first : first + num]
    rows, remainder = divmod(leaf.shape[dim], batch)
    if remainder or not rows:
        raise UsageError(
            f"value {index} of the batch has shape {list(leaf.shape)}: its dimension {dim} should hold {batch} samples"
        )
    return leaf.narrow(dim, first * rows, num * rows)
