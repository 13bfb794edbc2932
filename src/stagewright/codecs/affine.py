"""Affine quantization of blocks of 64 values: code = round((x − minimum) / scale), with minimum and scale in bfloat16.

    minimum   the block's smallest value, rounded down to bf16       x̂ = minimum + code · scale
    scale     (largest − minimum) / (2^b − 1), rounded up to bf16    |x − x̂| ≤ scale / 2

This is the definition in plain torch, for any device; the numba and Triton kernels produce the same bytes. That is
possible because every step is one IEEE operation in float32 (the product code · scale is exact: 8 by 8 bits), codes are
rounded half to even by adding 1.5 · 2^23 and reading the mantissa, and no subnormal number occurs: scales below 2^-100
are raised to it, minima below it to 0 or −2^-100. A block that contains NaN or Inf, or whose range exceeds float32, has
scale NaN and codes 0. All its 64 values decode as NaN and no other block is affected. Padding has code 0 and does not
count for minimum and scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stagewright.codecs.packing import BLOCK

MAGIC = 12582912.0  # 1.5 · 2^23: a small number added to it is rounded to an integer in the low bits
SMALLEST = 2.0**-100
_HIGH = -65536  # 0xFFFF0000: the bits of a float32 that bf16 keeps
_NAN = 0x7FC0


@dataclass(frozen=True, slots=True)
class Affine:
    """Quantized blocks."""

    codes: torch.Tensor
    """int32 [blocks, 64]."""
    scales: torch.Tensor
    """int32 [blocks]: the bits of the scale (low half) and of the minimum (high half)."""


def quantize(rows: torch.Tensor, bits: int, count: int) -> Affine:
    """Quantize float32 [blocks, 64], of which ``count`` values are not padding."""
    blocks = rows.shape[0]
    if not blocks:
        empty = torch.zeros(0, dtype=torch.int32, device=rows.device)
        return Affine(empty.view(0, BLOCK), empty)
    padding = blocks * BLOCK - count
    low, high = rows.amin(1), rows.amax(1)
    if padding:
        low[-1], high[-1] = rows[-1, :-padding].amin(), rows[-1, :-padding].amax()
    minimum = _round_down(low)
    span = (high - minimum).abs()  # devices order −0 and 0 differently: abs removes −0
    scale = _round_up(span * _step_fraction(bits))
    scale = torch.where((span > 0) & (scale < SMALLEST), SMALLEST, scale)
    is_finite = span < torch.inf  # false for NaN
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    shifted = (rows - minimum[:, None]) * inverse[:, None] + MAGIC
    mask = is_finite.to(torch.int32) * ((1 << bits) - 1)
    codes = shifted.view(torch.int32) & mask[:, None]
    if padding:
        codes[-1, -padding:] = 0
    minimum_bits = torch.where(is_finite, minimum.view(torch.int32) & _HIGH, 0)
    scale_bits = torch.where(is_finite, (scale.view(torch.int32) >> 16) & 0xFFFF, _NAN)
    return Affine(codes, minimum_bits | scale_bits)


def dequantize(blocks: Affine) -> torch.Tensor:
    """Return float32 [blocks, 64]."""
    scale = (blocks.scales << 16).view(torch.float32)
    minimum = (blocks.scales & _HIGH).view(torch.float32)
    return minimum[:, None] + blocks.codes.to(torch.float32) * scale[:, None]


def step_bound(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Bound the scale of each block, float32 [blocks, 1]."""
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    # bf16 lowers the minimum by at most 1/128 of itself and raises the scale by at most 1/128.
    span = (high - low) + low.abs() * 2.0**-7 + SMALLEST
    return span / ((1 << bits) - 1) * (1 + 2.0**-6) + SMALLEST


def _step_fraction(bits: int) -> torch.Tensor:
    """Return 1 / (2^b − 1), rounded to float32."""
    return torch.tensor(1.0 / ((1 << bits) - 1), dtype=torch.float32)


def _round_down(low: torch.Tensor) -> torch.Tensor:
    """Round down to bf16; magnitudes below 2^-100 become 0 or −2^-100."""
    bits = low.view(torch.int32)
    rounded = (torch.where(bits < 0, bits + 0xFFFF, bits) & _HIGH).view(torch.float32)
    small = torch.where(low < 0, -SMALLEST, 0.0)
    return torch.where(low.abs() < SMALLEST, small, torch.where(low.isnan(), torch.nan, rounded))


def _round_up(scale: torch.Tensor) -> torch.Tensor:
    """Round a non-negative number up to bf16."""
    return ((scale.view(torch.int32) + 0xFFFF) & _HIGH).view(torch.float32)
