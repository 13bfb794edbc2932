"""Perturbations of rounding size, to measure how much rounding alone changes the tensors of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

# Relative to the largest value. A sum of n terms in another order differs by several rounding errors in float32; in the
# shorter formats the result is rounded once, from a float32 sum.
_SIZES = {torch.float64: 2.0**-50, torch.float32: 2.0**-21, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


class Perturbation:
    """Random noise of rounding size; the same for the same seed, and independent of torch's global generator."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        """Return a floating-point tensor with noise; others as they are."""
        size = _SIZES.get(value.dtype)
        if size is None or not value.numel():
            return value
        noise = torch.rand(value.shape, generator=self._generator).to(value.device) * 2 - 1
        sizes = value.detach().abs().nan_to_num(nan=0.0, posinf=0.0).to(torch.float64)  # a mask has infinities
        return (value + noise.to(torch.float64) * sizes.amax() * size).to(value.dtype)

    def tree(self, value: Any) -> Any:
        """Add noise to every tensor in a nested value."""
        return pytree.tree_map_only(torch.Tensor, self.tensor, value)
