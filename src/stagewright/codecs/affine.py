"""Blocks of 64 values as small integers: code = round((x − minimum) / scale), both numbers bfloat16.

    minimum   the block's smallest value, rounded down to bf16       x̂ = minimum + code · scale
    scale     (largest − minimum) / (2^b − 1), rounded up to bf16    |x − x̂| ≤ scale / 2

This is the definition in plain torch, on any device; the fast kernels give the same bytes. What makes that possible:
every step is one IEEE operation in float32 (the product code · scale is exact: 8 by 8 bits), codes are rounded half to
even by adding 1.5 · 2^23 and reading the mantissa, and scales and minima below 2^-100 are raised to it, or the minimum
to 0, so that no device meets a subnormal number. A block that holds NaN or Inf, or whose range exceeds float32, has
the scale NaN and codes 0: all its 64 values decode as NaN, so that nothing is hidden and no other block is touched.
Codes of the padding are 0; it takes no part in minimum and scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stagewright.codecs.packing import BLOCK

__all__ = ["MAGIC", "SMALLEST", "Affine", "dequantise", "quantise", "step_bound"]

MAGIC = 12582912.0  # 1.5 · 2^23: what is added to it comes out rounded, in the low bits
SMALLEST = 2.0**-100
_HIGH = -65536  # 0xFFFF0000: the bits of a float32 that bf16 keeps
_NAN = 0x7FC0


@dataclass(frozen=True, slots=True)
class Affine:
    """Blocks, quantised."""

    codes: torch.Tensor
    """int32 [blocks, 64]."""
    scales: torch.Tensor
    """int32 [blocks]: the bits of the scale (low half) and of the minimum (high half)."""


def quantise(rows: torch.Tensor, bits: int, count: int) -> Affine:
    """Quantise float32 [blocks, 64], of which ``count`` values are real."""
    blocks = rows.shape[0]
    if not blocks:
        empty = torch.zeros(0, dtype=torch.int32, device=rows.device)
        return Affine(empty.view(0, BLOCK), empty)
    padding = blocks * BLOCK - count
    low, high = rows.amin(1), rows.amax(1)
    if padding:
        low[-1], high[-1] = rows[-1, :-padding].amin(), rows[-1, :-padding].amax()
    minimum = _down(low)
    span = (high - minimum).abs()  # which of −0 and 0 is the larger one depends on the device: no −0 here
    scale = _up(span * _share(bits))
    scale = torch.where((span > 0) & (scale < SMALLEST), SMALLEST, scale)
    good = span < torch.inf  # neither infinite nor NaN
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    moved = (rows - minimum[:, None]) * inverse[:, None] + MAGIC
    mask = good.to(torch.int32) * ((1 << bits) - 1)
    codes = moved.view(torch.int32) & mask[:, None]
    if padding:
        codes[-1, -padding:] = 0
    minimum_bits = torch.where(good, minimum.view(torch.int32) & _HIGH, 0)
    scale_bits = torch.where(good, (scale.view(torch.int32) >> 16) & 0xFFFF, _NAN)
    return Affine(codes, minimum_bits | scale_bits)


def dequantise(found: Affine) -> torch.Tensor:
    """Float32 [blocks, 64]."""
    scale = (found.scales << 16).view(torch.float32)
    minimum = (found.scales & _HIGH).view(torch.float32)
    return minimum[:, None] + found.codes.to(torch.float32) * scale[:, None]


def step_bound(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """The largest scale that blocks of such values can get, float32 [blocks, 1]."""
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    # The minimum moves down by a 128th of itself at most, the scale up by a 128th.
    span = (high - low) + low.abs() * 2.0**-7 + SMALLEST
    return span / ((1 << bits) - 1) * (1 + 2.0**-6) + SMALLEST


def _share(bits: int) -> torch.Tensor:
    """1 / (2^b − 1), rounded to float32."""
    return torch.tensor(1.0 / ((1 << bits) - 1), dtype=torch.float32)


def _down(low: torch.Tensor) -> torch.Tensor:
    """Rounded down to bf16; small ones to 0 or −2^-100."""
    bits = low.view(torch.int32)
    rounded = (torch.where(bits < 0, bits + 0xFFFF, bits) & _HIGH).view(torch.float32)
    small = torch.where(low < 0, -SMALLEST, 0.0)
    return torch.where(low.abs() < SMALLEST, small, torch.where(low.isnan(), torch.nan, rounded))


def _up(scale: torch.Tensor) -> torch.Tensor:
    """A number of at least 0, rounded up to bf16."""
    return ((scale.view(torch.int32) + 0xFFFF) & _HIGH).view(torch.float32)
