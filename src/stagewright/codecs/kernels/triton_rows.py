"""Triton kernels with one row per thread: 64 values in registers, so that rotation and extremes need no exchange.

Thread t:  row t ─► 16-byte loads ─► 64 registers ─► 6 stages ─► min, max ─► 64 codes ─► 8 words
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"
# Decorated functions are in Triton's language: its compiler checks the types.

from __future__ import annotations

import triton
import triton.language as tl

from stagewright.codecs.kernels.triton_blocks import (
    block_scale,
    decode_value,
    encode_raised,
    greatest,
    least,
    load_columns,
    store_columns,
    write_header,
)
from stagewright.codecs.kernels.triton_rotation import NEGATED, rotate, rotate_back


def _magic_sum(bits: int) -> int:
    """Return the sum of MAGIC's bits over all codes of a word, as an int32."""
    total = sum(0x4B400000 << (bits * index) for index in range(32 // bits)) % 2**32
    return total - 2**32 if total >= 2**31 else total


MAGIC_SUMS = tl.constexpr(tuple(_magic_sum(bits) if bits in (4, 8) else 0 for bits in range(9)))


@triton.jit
def _split_columns(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Split [rows, width] into ``width`` tensors [rows]; each thread keeps its values, so no data moves."""
    if WIDTH == 1:
        return (tl.reshape(x, (ROWS,)),)
    else:
        even, odd = tl.split(tl.reshape(x, (ROWS, WIDTH // 2, 2)))
        a = _split_columns(even, ROWS, WIDTH // 2)
        b = _split_columns(odd, ROWS, WIDTH // 2)
        joined = ()
        for index in tl.static_range(WIDTH // 2):
            joined = joined + (a[index], b[index])  # noqa: RUF005 - Triton has no unpacking
        return joined


@triton.jit
def _join_columns(columns, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Join ``width`` tensors [rows] to one [rows, width]."""
    if WIDTH == 1:
        return tl.reshape(columns[0], (ROWS, 1))
    else:
        even = ()
        odd = ()
        for index in tl.static_range(WIDTH // 2):
            even = even + (columns[2 * index],)  # noqa: RUF005
            odd = odd + (columns[2 * index + 1],)  # noqa: RUF005
        pair = tl.join(_join_columns(even, ROWS, WIDTH // 2), _join_columns(odd, ROWS, WIDTH // 2))
        return tl.reshape(pair, (ROWS, WIDTH))


@triton.jit
def encode_rows(
    x, codes, scales, header, out, count, blocks,
    BITS: tl.constexpr, HEAD: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program == 0:
        write_header(header, out, HEAD)
    rows = program * ROWS + tl.arange(0, ROWS)
    values = ()
    if x.dtype.element_ty == tl.int32:  # two bfloat16 values per word
        for first in tl.static_range(0, 32, WIDTH):
            offsets = rows[:, None].to(tl.int64) * 32 + (first + tl.arange(0, WIDTH))[None, :]
            pairs = tl.load(x + offsets, mask=(rows < blocks)[:, None], other=0)
            columns = _split_columns(pairs, ROWS, WIDTH)
            for pair in tl.static_range(WIDTH):
                even = (columns[pair] << 16).to(tl.float32, bitcast=True)
                odd = (columns[pair] & -65536).to(tl.float32, bitcast=True)
                values = values + (even, odd)  # noqa: RUF005
    else:
        for first in tl.static_range(0, 64, WIDTH):
            part, _ = load_columns(x, rows, first, count, WIDTH, FULL, blocks)
            values = values + _split_columns(part, ROWS, WIDTH)
    if ROTATED:
        values = rotate(values)
    low = values[0]
    high = values[0]
    for index in tl.static_range(1, 64):
        low = least(low, values[index])
        high = greatest(high, values[index])
    # `rotate` omits the factor 1/8; a power of two in the scale changes no rounding.
    size: tl.constexpr = 8.0 if ROTATED else 1.0
    minimum, inverse, mask, stored = block_scale(low * (1 / size), high * (1 / size), BITS)
    tl.store(scales + rows, stored, mask=rows < blocks)
    minimum = minimum * size
    inverse = inverse * (1 / size)
    num_words: tl.constexpr = 2 * BITS
    mask = tl.where(mask == 0, 0, -1)
    words = ()
    for word in tl.static_range(num_words):
        packed = tl.zeros((ROWS,), tl.int32)
        for byte in tl.static_range(3, -1, -1):
            if BITS == 4:
                packed = (packed << 4) + encode_raised(values[word * 4 + byte + 32], minimum, inverse)
            packed = (packed << BITS) + encode_raised(values[word * 4 + byte], minimum, inverse)
        words = words + ((packed - MAGIC_SUMS[BITS]) & mask,)  # noqa: RUF005
    offsets = rows[:, None].to(tl.int64) * num_words + tl.arange(0, num_words)[None, :]
    tl.store(codes + offsets, _join_columns(words, ROWS, num_words), mask=(rows < blocks)[:, None])


@triton.jit
def _decode_at(words, scale, minimum, INDEX: tl.constexpr, BITS: tl.constexpr, ROTATED: tl.constexpr):
    """Decode value INDEX of each row.

    The code is not shifted down in its half word: it is 2^shift too large, and the scale is divided by that.
    """
    byte: tl.constexpr = INDEX % 32 if BITS == 4 else INDEX
    shift: tl.constexpr = 8 * (byte % 2) + (4 if BITS == 4 and INDEX >= 32 else 0)
    half = words[byte // 4]
    if byte % 4 >= 2:
        half = half >> 16
    code = half & (((1 << BITS) - 1) << shift)
    factor: tl.constexpr = (-1.0 if ROTATED and NEGATED[INDEX] else 1.0) / (1 << shift)
    if ROTATED and NEGATED[INDEX]:
        return decode_value(code, scale * factor, -minimum)
    else:
        return decode_value(code, scale * factor, minimum)


@triton.jit
def decode_rows(
    codes, scales, out, count, blocks,
    BITS: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < blocks
    stored = tl.load(scales + rows, mask=inside, other=0)
    size: tl.constexpr = 0.125 if ROTATED else 1.0
    scale = (stored << 16).to(tl.float32, bitcast=True) * size
    minimum = (stored & -65536).to(tl.float32, bitcast=True) * size
    num_words: tl.constexpr = 2 * BITS
    words = ()
    for first in tl.static_range(0, num_words, 4):
        offsets = rows[:, None].to(tl.int64) * num_words + (first + tl.arange(0, 4))[None, :]
        part = tl.load(codes + offsets, mask=inside[:, None], other=0)
        words = words + _split_columns(part, ROWS, 4)
    values = ()
    for index in tl.static_range(64):
        values = values + (_decode_at(words, scale, minimum, index, BITS, ROTATED),)  # noqa: RUF005
    if ROTATED:
        values = rotate_back(values)
    for first in tl.static_range(0, 64, WIDTH):
        part = ()
        for index in tl.static_range(WIDTH):
            part = part + (values[first + index],)  # noqa: RUF005
        store_columns(out, rows, first, _join_columns(part, ROWS, WIDTH), count, blocks, WIDTH, FULL)
