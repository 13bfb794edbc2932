"""Turn each block of 64 values so that an outlier is shared by all: signs, then a Walsh–Hadamard transform.

    y = H · (s ∘ x) / 8        x = s ∘ (H · y) / 8        H = 64 × 64, entries ±1; lengths stay the same

    stage of size h = 1, 2, 4, … 32:    (a, b) ─► (a + b, a − b)    for values h apart

The order of additions is part of the format: every device adds in this order and so gets the same bits. The signs are
fixed: without them a constant block would become one spike.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from stagewright.codecs.packing import BLOCK

__all__ = ["SIGN_BITS", "hadamard", "rotate", "rotate_back", "signs"]

SIGN_BITS = (
    0x3C6EF372FE94F82A  # 2^65 / golden ratio, mod 2^64; bit i is set where value i changes its sign: not value 0
)


@lru_cache(maxsize=16)
def signs(device: torch.device) -> torch.Tensor:
    """+1 and −1 for the 64 values of a block."""
    listed = [-1.0 if SIGN_BITS >> at & 1 else 1.0 for at in range(BLOCK)]
    return torch.tensor(listed, dtype=torch.float32, device=device)


def hadamard(rows: torch.Tensor) -> torch.Tensor:
    """H · x for each row, not scaled."""
    size = 1
    while size < BLOCK:
        pairs = rows.view(-1, BLOCK // (2 * size), 2, size)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        rows = torch.stack((first + second, first - second), 2).view(-1, BLOCK)
        size *= 2
    return rows


def rotate(rows: torch.Tensor) -> torch.Tensor:
    """Rotate float32 [blocks, 64]."""
    return hadamard(rows * signs(rows.device)) * 0.125


def rotate_back(rows: torch.Tensor) -> torch.Tensor:
    """The inverse, up to rounding."""
    return hadamard(rows) * signs(rows.device) * 0.125
