"""Collectives of tensor parallelism in one unit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTraffic:
    """Collectives of one unit along the tensor axis, for one micro-batch of the profiled size."""

    forward_bytes: tuple[int, ...] = ()
    """Bytes of each all-reduce in forward."""
    backward_bytes: tuple[int, ...] = ()
    """Bytes of each all-reduce in backward."""
    gathered_bytes: tuple[int, ...] = ()
    """Bytes of each all-gather in forward: logits of a divided vocabulary that are needed whole."""
    loss_bytes: tuple[int, ...] = ()
    """Bytes of each all-reduce of a loss after the last unit, which no recomputation repeats."""
