"""Triton functions that the block codecs' kernels share: loads and stores of blocks, scales, codes.

Operations match `affine` bit for bit: divisions are IEEE's and nothing is fused but exact products.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"
# Decorated functions are in Triton's language: its compiler checks the types.

from __future__ import annotations

import triton
import triton.language as tl

MAGIC = tl.constexpr(12582912.0)
SMALLEST = tl.constexpr(2.0**-100)


@triton.jit
def least(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def greatest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_scale(low, high, BITS: tl.constexpr):
    """Compute the minimum, inverse scale, code mask and stored word of each row."""
    bits = low.to(tl.int32, bitcast=True)
    rounded = (tl.where(bits < 0, bits + 0xFFFF, bits) & -65536).to(tl.float32, bitcast=True)
    minimum = tl.where(tl.abs(low) < SMALLEST, tl.where(low < 0, -SMALLEST, 0.0), rounded)
    span = tl.abs(high - minimum)  # never −0
    is_finite = (span < float("inf")) & (low == low)
    share: tl.constexpr = 1.0 / ((1 << BITS) - 1)
    raised = ((span * share).to(tl.int32, bitcast=True) + 0xFFFF) & -65536
    scale = raised.to(tl.float32, bitcast=True)
    scale = tl.where((span > 0) & (scale < SMALLEST), SMALLEST, scale)
    inverse = tl.where(scale > 0, tl.div_rn(1.0, scale), 0.0)
    mask = tl.where(is_finite, (1 << BITS) - 1, 0)
    high_half = tl.where(is_finite, minimum.to(tl.int32, bitcast=True) & -65536, 0)
    low_half = tl.where(is_finite, (scale.to(tl.int32, bitcast=True) >> 16) & 0xFFFF, 0x7FC0)
    return minimum, inverse, mask, high_half | low_half


@triton.jit
def encode_value(x, minimum, inverse, mask):
    return ((x - minimum) * inverse + MAGIC).to(tl.int32, bitcast=True) & mask


@triton.jit
def encode_raised(x, minimum, inverse):
    """Return a code plus the bits of MAGIC; one subtraction removes them from a sum of shifted codes."""
    return ((x - minimum) * inverse + MAGIC).to(tl.int32, bitcast=True)


@triton.jit
def decode_value(code, scale, minimum):
    """Dequantize; the fused product of 8 by 8 bits is exact, so the result equals a product and a sum."""
    return tl.fma(to_float(code), scale, minimum)


@triton.jit
def to_float(code):
    """Convert a small integer to float32 through its mantissa: conversion instructions are slow."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def write_header(header, out, HEAD: tl.constexpr):
    for start in tl.static_range(0, HEAD, 64):
        offsets = start + tl.arange(0, 64)
        tl.store(out + offsets, tl.load(header + offsets))


@triton.jit
def load_columns(x, rows, first, count, WIDTH: tl.constexpr, FULL: tl.constexpr, blocks):
    """Load values ``first`` to ``first + WIDTH`` of each row; also return which are not padding."""
    offsets = rows[:, None].to(tl.int64) * 64 + (first + tl.arange(0, WIDTH))[None, :]
    valid = (rows < blocks)[:, None] & (tl.full((1, WIDTH), 1, tl.int1) if FULL else offsets < count)
    return tl.load(x + offsets, mask=valid, other=0.0).to(tl.float32), valid


@triton.jit
def extremes(x, valid, FULL: tl.constexpr):
    low = x if FULL else tl.where(valid, x, float("inf"))
    high = x if FULL else tl.where(valid, x, float("-inf"))
    return low, high


@triton.jit
def store_columns(out, rows, first, values, count, blocks, WIDTH: tl.constexpr, FULL: tl.constexpr):
    offsets = rows[:, None].to(tl.int64) * 64 + (first + tl.arange(0, WIDTH))[None, :]
    valid = (rows < blocks)[:, None] & (tl.full((1, WIDTH), 1, tl.int1) if FULL else offsets < count)
    if out.dtype.element_ty == tl.float16:
        values = tl.where(values == values, tl.minimum(tl.maximum(values, -65504.0), 65504.0), values)
    tl.store(out + offsets, values.to(out.dtype.element_ty), mask=valid)
