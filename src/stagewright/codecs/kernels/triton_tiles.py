"""Triton kernels for blocks without rotation: each program handles a tile of rows of 64.

Each thread holds 16 bytes of a row; warp shuffles find the row's minimum and maximum.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"
# Decorated functions are in Triton's language: its compiler checks the types.

from __future__ import annotations

import triton
import triton.language as tl

from stagewright.codecs.kernels.triton_blocks import (
    block_scale,
    decode_value,
    encode_value,
    extremes,
    greatest,
    least,
    load_columns,
    store_columns,
    write_header,
)


@triton.jit
def encode_tiles(
    x, codes, scales, header, out, count, blocks,
    BITS: tl.constexpr, HEAD: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program == 0:
        write_header(header, out, HEAD)
    rows = program * ROWS + tl.arange(0, ROWS)
    inside = rows < blocks
    start = rows.to(tl.int64) * (8 * BITS)
    if BITS == 8:
        a, a_valid = load_columns(x, rows, 0, count, 64, FULL, blocks)
        low, high = extremes(a, a_valid, FULL)
    elif BITS == 4:
        a, a_valid = load_columns(x, rows, 0, count, 32, FULL, blocks)
        b, b_valid = load_columns(x, rows, 32, count, 32, FULL, blocks)
        low, high = extremes(a, a_valid, FULL)
        low_b, high_b = extremes(b, b_valid, FULL)
        low, high = least(low, low_b), greatest(high, high_b)
    else:
        a, a_valid = load_columns(x, rows, 0, count, 16, FULL, blocks)
        b, b_valid = load_columns(x, rows, 16, count, 16, FULL, blocks)
        c, c_valid = load_columns(x, rows, 32, count, 16, FULL, blocks)
        d, d_valid = load_columns(x, rows, 48, count, 16, FULL, blocks)
        low, high = extremes(a, a_valid, FULL)
        low_b, high_b = extremes(b, b_valid, FULL)
        low_c, high_c = extremes(c, c_valid, FULL)
        low_d, high_d = extremes(d, d_valid, FULL)
        low, high = (
            least(least(low, low_b), least(low_c, low_d)),
            greatest(greatest(high, high_b), greatest(high_c, high_d)),
        )
    minimum, inverse, mask, stored = block_scale(tl.reduce(low, 1, least), tl.reduce(high, 1, greatest), BITS)
    tl.store(scales + rows, stored, mask=inside)
    minimum, inverse, mask = minimum[:, None], inverse[:, None], mask[:, None]
    a = encode_value(a, minimum, inverse, mask if FULL else tl.where(a_valid, mask, 0))
    if BITS == 8:
        tl.store(codes + start[:, None] + tl.arange(0, 64)[None, :], a.to(tl.uint8), mask=inside[:, None])
    elif BITS == 4:
        b = encode_value(b, minimum, inverse, mask if FULL else tl.where(b_valid, mask, 0))
        offsets = start[:, None] + tl.arange(0, 32)[None, :]
        tl.store(codes + offsets, (a | (b << 4)).to(tl.uint8), mask=inside[:, None])
    else:
        b = encode_value(b, minimum, inverse, mask if FULL else tl.where(b_valid, mask, 0))
        c = encode_value(c, minimum, inverse, mask if FULL else tl.where(c_valid, mask, 0))
        d = encode_value(d, minimum, inverse, mask if FULL else tl.where(d_valid, mask, 0))
        offsets = start[:, None] + tl.arange(0, 16)[None, :]
        tl.store(codes + offsets, ((a & 15) | ((c & 15) << 4)).to(tl.uint8), mask=inside[:, None])
        tl.store(codes + offsets + 16, ((b & 15) | ((d & 15) << 4)).to(tl.uint8), mask=inside[:, None])
        top = (a >> 4) | ((b >> 4) << 2) | ((c >> 4) << 4) | ((d >> 4) << 6)
        tl.store(codes + offsets + 32, top.to(tl.uint8), mask=inside[:, None])


@triton.jit
def _load_bytes(codes, rows, first, blocks, WIDTH: tl.constexpr, BITS: tl.constexpr):
    offsets = rows[:, None].to(tl.int64) * (8 * BITS) + (first + tl.arange(0, WIDTH))[None, :]
    return tl.load(codes + offsets, mask=(rows < blocks)[:, None], other=0).to(tl.int32)


@triton.jit
def decode_tiles(codes, scales, out, count, blocks, BITS: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.load(scales + rows, mask=rows < blocks, other=0)
    scale = (word << 16).to(tl.float32, bitcast=True)[:, None]
    minimum = (word & -65536).to(tl.float32, bitcast=True)[:, None]
    if BITS == 8:
        a = _load_bytes(codes, rows, 0, blocks, 64, BITS)
        store_columns(out, rows, 0, decode_value(a, scale, minimum), count, blocks, 64, FULL)
    elif BITS == 4:
        a = _load_bytes(codes, rows, 0, blocks, 32, BITS)
        store_columns(out, rows, 0, decode_value(a & 15, scale, minimum), count, blocks, 32, FULL)
        store_columns(out, rows, 32, decode_value(a >> 4, scale, minimum), count, blocks, 32, FULL)
    else:
        a = _load_bytes(codes, rows, 0, blocks, 16, BITS)
        b = _load_bytes(codes, rows, 16, blocks, 16, BITS)
        top = _load_bytes(codes, rows, 32, blocks, 16, BITS)
        store_columns(out, rows, 0, decode_value((a & 15) | ((top & 3) << 4), scale, minimum), count, blocks, 16, FULL)
        store_columns(
            out, rows, 16, decode_value((b & 15) | ((top & 12) << 2), scale, minimum), count, blocks, 16, FULL
        )
        store_columns(out, rows, 32, decode_value((a >> 4) | (top & 48), scale, minimum), count, blocks, 16, FULL)
        store_columns(
            out, rows, 48, decode_value((b >> 4) | ((top & 192) >> 2), scale, minimum), count, blocks, 16, FULL
        )
