"""The tensors that cross the cuts of a pipeline, as both ends of a link know them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """Shape and dtype of a tensor to receive."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The tensors that cross each cut."""

    shapes: Callable[[int, int], Sequence[TensorShape]]
    """``shapes(cut, num_samples)``: every tensor that crosses a cut."""
    needs_gradient: Sequence[Sequence[bool]]
    """For each cut and tensor, whether its gradient is sent back."""
    compressible: Sequence[Sequence[bool]] = ()
    """For each cut and tensor, whether it is an activation that a codec may compress."""
