"""CPU kernels of the block codecs, compiled by numba: one pass over the tensor, with each block in the L1 cache.

    64 values ─► (signs, 6 stages) ─► minimum, maximum ─► scale ─► codes ─► bytes      see `affine` and `rotation`

Minimum and maximum are computed on integers that sort like the floats they encode: exact, vectorizable, with NaN at the
ends. The transform is Pease's: all stages are alike (adjacent pairs in, halves out), with the same order of additions
as `rotation`. Arithmetic must not be reordered or fused. Kernels are compiled on first use and cached on disk; values
that other files define are passed as arguments, because a cached kernel would not see them change.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from stagewright.codecs.affine import MAGIC, SMALLEST
from stagewright.codecs.packing import BLOCK
from stagewright.codecs.rotation import SIGN_BITS

_F = np.float32
_MAGIC, _SMALLEST, _ZERO, _ONE = _F(MAGIC), _F(SMALLEST), _F(0), _F(1)
_EIGHTH = _F(0.125)
_INFINITE = _F(np.inf)
_SIGNS = np.array([-(2**31) if SIGN_BITS >> index & 1 else 0 for index in range(BLOCK)], dtype=np.int32)


def _jit(function: Any) -> Any:
    """Compile on the first call and cache on disk where a cache folder is writable."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        return numba.njit(**options)(function)


@_jit
def _stage(a: Any, b: Any) -> None:
    for i in range(32):
        b[i] = a[2 * i] + a[2 * i + 1]
        b[i + 32] = a[2 * i] - a[2 * i + 1]


@_jit
def _transform(a: Any, b: Any) -> None:
    """Compute H · a in place; ``b`` is scratch space."""
    for _ in range(3):
        _stage(a, b)
        _stage(b, a)


@_jit
def _encode(values: Any, shift: int, real: int, codes: Any, scales: Any, bits: int, rotated: bool, signs: Any) -> None:
    """Encode rows of 64; only the first ``real`` values of a row count for minimum and maximum."""
    work = np.empty(BLOCK, np.int32)
    floats = work.view(np.float32)
    scratch = np.empty(BLOCK, np.float32)
    cell = np.empty(1, np.int32)
    cell_float = cell.view(np.float32)
    share, full, left = _ONE / _F((1 << bits) - 1), np.int32((1 << bits) - 1), np.int32(shift)
    for block in range(len(scales)):
        for i in range(BLOCK):
            work[i] = np.int32(values[block, i]) << left
        if rotated:
            for i in range(BLOCK):
                work[i] ^= signs[i]
            _transform(floats, scratch)
            for i in range(BLOCK):
                floats[i] *= _EIGHTH
        least, most = np.int32(2147483647), np.int32(-2147483648)
        if real == BLOCK:
            for i in range(BLOCK):
                key = work[i] ^ ((work[i] >> np.int32(31)) & np.int32(0x7FFFFFFF))
                least = min(least, key)
                most = max(most, key)
        else:
            for i in range(real):
                key = work[i] ^ ((work[i] >> np.int32(31)) & np.int32(0x7FFFFFFF))
                least = min(least, key)
                most = max(most, key)
        # NaNs lie beyond the keys of both infinities.
        is_finite = least > np.int32(-2139095041) and most < np.int32(2139095040)
        cell[0] = least ^ ((least >> np.int32(31)) & np.int32(0x7FFFFFFF))
        low = cell_float[0]
        cell[0] = most ^ ((most >> np.int32(31)) & np.int32(0x7FFFFFFF))
        high = cell_float[0]
        if abs(low) < _SMALLEST:
            minimum = -_SMALLEST if low < _ZERO else _ZERO
        else:
            cell_float[0] = low
            lowered = cell[0] + np.int32(0xFFFF) if cell[0] < 0 else cell[0]
            cell[0] = lowered & np.int32(-65536)
            minimum = cell_float[0]
        span = abs(high - minimum)  # never −0
        if not is_finite or not span < _INFINITE:
            scales[block] = np.int32(0x7FC0)
            mask, inverse, minimum = np.int32(0), _ZERO, _ZERO
        else:
            cell_float[0] = span * share
            cell[0] = (cell[0] + np.int32(0xFFFF)) & np.int32(-65536)
            scale = cell_float[0]
            if span > _ZERO and scale < _SMALLEST:
                scale = _SMALLEST
            cell_float[0] = scale
            packed = (cell[0] >> np.int32(16)) & np.int32(0xFFFF)
            cell_float[0] = minimum
            scales[block] = (cell[0] & np.int32(-65536)) | packed
            mask, inverse = full, (_ONE / scale if scale > _ZERO else _ZERO)
        for i in range(BLOCK):
            floats[i] = (floats[i] - minimum) * inverse + _MAGIC
        if real < BLOCK:
            for i in range(real, BLOCK):
                work[i] = np.int32(0)
        if bits == 4:
            for i in range(32):
                codes[block, i] = np.uint8((work[i] & mask) | ((work[i + 32] & mask) << np.int32(4)))
        elif bits == 8:
            for i in range(BLOCK):
                codes[block, i] = np.uint8(work[i] & mask)
        else:
            mask &= np.int32(15)
            for i in range(32):
                codes[block, i] = np.uint8((work[i] & mask) | ((work[i + 32] & mask) << np.int32(4)))
            mask = (mask & np.int32(3)) << np.int32(4)
            for i in range(16):
                first = ((work[i] & mask) >> np.int32(4)) | ((work[i + 16] & mask) >> np.int32(2))
                second = (work[i + 32] & mask) | ((work[i + 48] & mask) << np.int32(2))
                codes[block, i + 32] = np.uint8(first | second)


@_jit
def _expand(codes: Any, block: int, bits: int, minimum: Any, scale: Any, floats: Any, row: int) -> None:
    """Dequantize the 64 values of one block."""
    if bits == 4:
        for i in range(32):
            byte = np.int32(codes[block, i])
            floats[row, i] = minimum + _F(byte & np.int32(15)) * scale
            floats[row, i + 32] = minimum + _F(byte >> np.int32(4)) * scale
    elif bits == 8:
        for i in range(BLOCK):
            floats[row, i] = minimum + _F(np.int32(codes[block, i])) * scale
    else:
        for i in range(16):
            low, high = np.int32(codes[block, i]), np.int32(codes[block, i + 32])
            first = (low & np.int32(15)) | ((high & np.int32(3)) << np.int32(4))
            second = (low >> np.int32(4)) | (high & np.int32(48))
            floats[row, i] = minimum + _F(first) * scale
            floats[row, i + 32] = minimum + _F(second) * scale
        for i in range(16):
            low, high = np.int32(codes[block, i + 16]), np.int32(codes[block, i + 32])
            first = (low & np.int32(15)) | ((high & np.int32(12)) << np.int32(2))
            second = (low >> np.int32(4)) | ((high & np.int32(192)) >> np.int32(2))
            floats[row, i + 16] = minimum + _F(first) * scale
            floats[row, i + 48] = minimum + _F(second) * scale


@_jit
def _decode(codes: Any, scales: Any, out: Any, half: Any, kind: int, bits: int, rotated: bool, signs: Any) -> None:
    """Decode rows of 64. ``kind`` 0: float32 into ``out``; 1: the bits of bf16 into ``half``."""
    work = np.empty((1, BLOCK), np.int32)
    floats = work.view(np.float32)
    scratch = np.empty(BLOCK, np.float32)
    cell = np.empty(1, np.int32)
    cell_float = cell.view(np.float32)
    for block in range(len(scales)):
        cell[0] = scales[block] << np.int32(16)
        scale = cell_float[0]
        cell[0] = scales[block] & np.int32(-65536)
        minimum = cell_float[0]
        if not rotated and kind == 0:
            _expand(codes, block, bits, minimum, scale, out, block)
            continue
        _expand(codes, block, bits, minimum, scale, floats, 0)
        if rotated:
            _transform(floats[0], scratch)
            for i in range(BLOCK):
                floats[0, i] *= _EIGHTH
            for i in range(BLOCK):
                work[0, i] ^= signs[i]
        if kind == 0:
            for i in range(BLOCK):
                out[block, i] = floats[0, i]
        elif scale == scale:
            for i in range(BLOCK):
                word = work[0, i]
                word += np.int32(0x7FFF) + ((word >> np.int32(16)) & np.int32(1))
                half[block, i] = np.int16(word >> np.int32(16))
        else:
            for i in range(BLOCK):
                half[block, i] = np.int16(0x7FC0)


_NO_FLOATS, _NO_HALVES = np.empty((0, BLOCK), np.float32), np.empty((0, BLOCK), np.int16)


def encode(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bits: int, rotated: bool, header: object
) -> None:
    """Encode a contiguous tensor into codes and scales (uint8); ``header`` is unused on a CPU."""
    flat = values.view(-1)
    flat = flat.view(torch.int16) if flat.dtype is torch.bfloat16 else flat.float().view(torch.int32)
    shift = 16 if flat.dtype is torch.int16 else 0
    whole, rest = divmod(flat.numel(), BLOCK)
    code_rows, scale_words = codes.view(-1, 8 * bits).numpy(), scales.view(torch.int32).numpy()
    if whole:
        rows = flat[: whole * BLOCK].view(whole, BLOCK).numpy()
        _encode(rows, shift, BLOCK, code_rows[:whole], scale_words[:whole], bits, rotated, _SIGNS)
    if rest:
        last = torch.nn.functional.pad(flat[whole * BLOCK :], (0, BLOCK - rest)).view(1, BLOCK).numpy()
        _encode(last, shift, BLOCK if rotated else rest, code_rows[whole:], scale_words[whole:], bits, rotated, _SIGNS)


def decode(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, bits: int, rotated: bool) -> None:
    """Decode codes and scales into a contiguous tensor."""
    flat = out.view(-1)
    whole, rest = divmod(flat.numel(), BLOCK)
    code_rows, scale_words = codes.view(-1, 8 * bits).numpy(), scales.view(torch.int32).numpy()
    if out.dtype is torch.float16:
        wide = torch.empty(flat.numel(), dtype=torch.float32)
        decode(codes, scales, wide, bits, rotated)
        flat.copy_(wide.clamp_(-65504.0, 65504.0))
        return
    is_half = out.dtype is torch.bfloat16

    def run(rows: torch.Tensor, first: int, end: int) -> None:
        floats, halves = (_NO_FLOATS, rows.view(torch.int16).numpy()) if is_half else (rows.numpy(), _NO_HALVES)
        _decode(code_rows[first:end], scale_words[first:end], floats, halves, int(is_half), bits, rotated, _SIGNS)

    if whole:
        run(flat[: whole * BLOCK].view(whole, BLOCK), 0, whole)
    if rest:
        last = torch.empty(1, BLOCK, dtype=out.dtype)
        run(last, whole, whole + 1)
        flat[whole * BLOCK :] = last[0, :rest]
