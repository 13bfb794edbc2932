"""Rotation of each block of 64 values, which spreads outliers over the block: random signs, then Walsh–Hadamard.

    y = H · (s ∘ x) / 8        x = s ∘ (H · y) / 8        H = 64 × 64, entries ±1; norms are preserved

    stage of size h = 1, 2, 4, … 32:    (a, b) ─► (a + b, a − b)    for values h apart

The order of additions is part of the format: every device adds in this order and gets the same bits. The signs are
fixed; without them a constant block would become a single spike.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from stagewright.codecs.packing import BLOCK

SIGN_BITS = 0x3C6EF372FE94F82A  # 2^65 / golden ratio mod 2^64; bit i set: value i changes its sign (value 0 does not)


@lru_cache(maxsize=16)
def signs(device: torch.device) -> torch.Tensor:
    """Return +1 or −1 for each of the 64 values of a block."""
    values = [-1.0 if SIGN_BITS >> index & 1 else 1.0 for index in range(BLOCK)]
    return torch.tensor(values, dtype=torch.float32, device=device)


def hadamard(rows: torch.Tensor) -> torch.Tensor:
    """Compute H · x for each row, unscaled."""
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
    """Invert `rotate`, up to rounding."""
    return hadamard(rows) * signs(rows.device) * 0.125
