"""One operator of a micro-batch on one rank: what the operators of blocks and of attention have in common."""

from __future__ import annotations

from dataclasses import dataclass

from stagewright.analytic.hardware.kernels import Kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator of a micro-batch."""

    name: str
    forward_s: float
    backward_s: float
    flops: float = 0.0
    """Arithmetic of forward in matrix products."""
    kernels: int = 1
    """Kernels of forward."""
    backward_kernels: int = 2
    weight_s: float = 0.0
    """Part of backward that computes weight gradients."""
    saved_bytes: float = 0.0
    """Activations kept for backward."""
    selective: bool = False
    """Whether selective recomputation repeats it instead of saving its activations."""


def stream_operator(
    kernels: Kernels,
    name: str,
    forward_bytes: float,
    backward_bytes: float,
    *,
    saved: float = 0.0,
    num_kernels: int = 1,
    backward_kernels: int = 1,
    selective: bool = False,
) -> Operator:
    """Return an operator that is limited by the bytes that it reads and writes."""
    return Operator(
        name=name,
        forward_s=kernels.stream_s(forward_bytes, num_kernels),
        backward_s=kernels.stream_s(backward_bytes, backward_kernels),
        kernels=num_kernels,
        backward_kernels=backward_kernels,
        saved_bytes=saved,
        selective=selective,
    )
