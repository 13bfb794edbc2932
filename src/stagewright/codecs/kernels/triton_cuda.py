"""The block codecs on a GPU, in Triton: one kernel a message, header included; the same bytes as on a CPU.

    plain     a tile of rows of 64; each thread holds 16 bytes of a row, minimum and maximum by shuffles in the warp
    rows      a row a thread: 64 values in registers, so that the transform and the extremes need no exchange at all

              thread t:  row t ─► 16-byte loads ─► 64 registers ─► 6 stages ─► min, max ─► 64 codes ─► 8 words

No arithmetic is fused (``enable_fp_fusion=False``) and divisions are IEEE's, or a CPU could not give the same bytes;
signs are free (they are static, so they become operands' modifiers). Nothing is read on the host.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"
# What is decorated is Triton's language, not Python's: types are the compiler's.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from stagewright.codecs.rotation import SIGN_BITS

__all__ = ["decode", "encode"]

MAGIC = tl.constexpr(12582912.0)
SMALLEST = tl.constexpr(2.0**-100)


def _turns() -> list[bool]:
    """For stage h and value i, at 64 · log2(h) + i: whether the pair's signs differ when they come to that stage.

    A pair gives ±(a + b), ±(a − b) if its signs are equal, else ±(a − b), ±(a + b); both keep the first one's sign.
    So signs cost nothing, and in the end all is as value 0 is, which has none.
    """
    signs = [bool(SIGN_BITS >> at & 1) for at in range(64)]
    sizes = [1, 2, 4, 8, 16, 32]
    return [signs[i & ~size & -size] != signs[(i | size) & -size] for size in sizes for i in range(64)]


def _ways() -> tuple[list[int], list[bool]]:
    """The way back: how each pair of a stage is added so that outputs have their signs; which inputs change theirs.

    way 0: a + b, a − b     way 1: a + b, b − a     way 2: b − a, a + b, where b comes with its sign changed
    """
    wanted = [bool(SIGN_BITS >> at & 1) for at in range(64)]
    ways: dict[tuple[int, int], int] = {}
    for size in (32, 16, 8, 4, 2, 1):
        before = list(wanted)
        for i in range(64):
            if not i & size:
                pair = (wanted[i], wanted[i | size])
                ways[size, i] = ways[size, i | size] = {(False, True): 1, (True, False): 2}.get(pair, 0)
                before[i], before[i | size] = (pair[0] and pair[1], pair[0])
        wanted = before
    return [ways[size, i] for size in (1, 2, 4, 8, 16, 32) for i in range(64)], wanted


TURNS = tl.constexpr(tuple(_turns()))
WAYS = tl.constexpr(tuple(_ways()[0]))
CHANGED = tl.constexpr(tuple(_ways()[1]))


def _wrapped(bits: int) -> int:
    """The sum of MAGIC's bits over all codes of a word, as an int32."""
    total = sum(0x4B400000 << (bits * at) for at in range(32 // bits)) % 2**32
    return total - 2**32 if total >= 2**31 else total


RAISED = tl.constexpr(tuple(_wrapped(bits) if bits in (4, 8) else 0 for bits in range(9)))

PLAIN_ENCODE = {"rows": 64, "num_warps": 4}
PLAIN_DECODE = {"rows": 0, "num_warps": 1, "width": 64}
ROTATED_ENCODE = {2: {"num_warps": 4, "width": 0}, 4: {"num_warps": 1, "width": 64}}
ROTATED_DECODE = {"num_warps": 1, "width": 64}
"""Rows of a program (0: a row a thread, as for rotated ones) and its warps; how much of a thread's row is loaded or
stored at once (0: 16 bytes; more: that many elements, by way of shared memory, which is quicker where memory is the
limit and not arithmetic: for rotated encoding that depends on the bytes of a value). ``benchmarks/codec_cuda.py
--variants`` found them on an H200."""


@triton.jit
def _least(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _most(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _scale(low, high, BITS: tl.constexpr):
    """Minimum, its inverse scale, the mask of codes and the word that is stored, for each row."""
    bits = low.to(tl.int32, bitcast=True)
    rounded = (tl.where(bits < 0, bits + 0xFFFF, bits) & -65536).to(tl.float32, bitcast=True)
    minimum = tl.where(tl.abs(low) < SMALLEST, tl.where(low < 0, -SMALLEST, 0.0), rounded)
    span = tl.abs(high - minimum)  # never −0
    good = (span < float("inf")) & (low == low)
    share: tl.constexpr = 1.0 / ((1 << BITS) - 1)
    raised = ((span * share).to(tl.int32, bitcast=True) + 0xFFFF) & -65536
    scale = raised.to(tl.float32, bitcast=True)
    scale = tl.where((span > 0) & (scale < SMALLEST), SMALLEST, scale)
    inverse = tl.where(scale > 0, tl.div_rn(1.0, scale), 0.0)
    mask = tl.where(good, (1 << BITS) - 1, 0)
    high_half = tl.where(good, minimum.to(tl.int32, bitcast=True) & -65536, 0)
    low_half = tl.where(good, (scale.to(tl.int32, bitcast=True) >> 16) & 0xFFFF, 0x7FC0)
    return minimum, inverse, mask, high_half | low_half


@triton.jit
def _code(x, minimum, inverse, mask):
    return ((x - minimum) * inverse + MAGIC).to(tl.int32, bitcast=True) & mask


@triton.jit
def _raised(x, minimum, inverse):
    """A code plus the bits of MAGIC: sums of such, shifted, lose these in one subtraction."""
    return ((x - minimum) * inverse + MAGIC).to(tl.int32, bitcast=True)


@triton.jit
def _value(code, scale, minimum):
    """Fused, but the product of 8 by 8 bits is exact: the same as a product and a sum."""
    return tl.fma(_float(code), scale, minimum)


@triton.jit
def _float(code):
    """A small integer as float32, by its mantissa: conversions are slow."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _head(head, out, HEAD: tl.constexpr):
    for at in tl.static_range(0, HEAD, 64):
        place = at + tl.arange(0, 64)
        tl.store(out + place, tl.load(head + place))


@triton.jit
def _part(x, rows, first, count, WIDTH: tl.constexpr, FULL: tl.constexpr, blocks):
    """Values ``first`` to ``first + WIDTH`` of each row, and which of them there are."""
    place = rows[:, None].to(tl.int64) * 64 + (first + tl.arange(0, WIDTH))[None, :]
    there = (rows < blocks)[:, None] & (tl.full((1, WIDTH), 1, tl.int1) if FULL else place < count)
    return tl.load(x + place, mask=there, other=0.0).to(tl.float32), there


@triton.jit
def _extremes(x, there, FULL: tl.constexpr):
    low = x if FULL else tl.where(there, x, float("inf"))
    high = x if FULL else tl.where(there, x, float("-inf"))
    return low, high


@triton.jit
def _encode_plain(
    x, codes, scales, head, out, count, blocks,
    BITS: tl.constexpr, HEAD: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program == 0:
        _head(head, out, HEAD)
    rows = program * ROWS + tl.arange(0, ROWS)
    inside = rows < blocks
    start = rows.to(tl.int64) * (8 * BITS)
    if BITS == 8:
        a, a_there = _part(x, rows, 0, count, 64, FULL, blocks)
        low, high = _extremes(a, a_there, FULL)
    elif BITS == 4:
        a, a_there = _part(x, rows, 0, count, 32, FULL, blocks)
        b, b_there = _part(x, rows, 32, count, 32, FULL, blocks)
        low, high = _extremes(a, a_there, FULL)
        low_b, high_b = _extremes(b, b_there, FULL)
        low, high = _least(low, low_b), _most(high, high_b)
    else:
        a, a_there = _part(x, rows, 0, count, 16, FULL, blocks)
        b, b_there = _part(x, rows, 16, count, 16, FULL, blocks)
        c, c_there = _part(x, rows, 32, count, 16, FULL, blocks)
        d, d_there = _part(x, rows, 48, count, 16, FULL, blocks)
        low, high = _extremes(a, a_there, FULL)
        low_b, high_b = _extremes(b, b_there, FULL)
        low_c, high_c = _extremes(c, c_there, FULL)
        low_d, high_d = _extremes(d, d_there, FULL)
        low, high = _least(_least(low, low_b), _least(low_c, low_d)), _most(_most(high, high_b), _most(high_c, high_d))
    minimum, inverse, mask, stored = _scale(tl.reduce(low, 1, _least), tl.reduce(high, 1, _most), BITS)
    tl.store(scales + rows, stored, mask=inside)
    minimum, inverse, mask = minimum[:, None], inverse[:, None], mask[:, None]
    a = _code(a, minimum, inverse, mask if FULL else tl.where(a_there, mask, 0))
    if BITS == 8:
        tl.store(codes + start[:, None] + tl.arange(0, 64)[None, :], a.to(tl.uint8), mask=inside[:, None])
    elif BITS == 4:
        b = _code(b, minimum, inverse, mask if FULL else tl.where(b_there, mask, 0))
        place = start[:, None] + tl.arange(0, 32)[None, :]
        tl.store(codes + place, (a | (b << 4)).to(tl.uint8), mask=inside[:, None])
    else:
        b = _code(b, minimum, inverse, mask if FULL else tl.where(b_there, mask, 0))
        c = _code(c, minimum, inverse, mask if FULL else tl.where(c_there, mask, 0))
        d = _code(d, minimum, inverse, mask if FULL else tl.where(d_there, mask, 0))
        place = start[:, None] + tl.arange(0, 16)[None, :]
        tl.store(codes + place, ((a & 15) | ((c & 15) << 4)).to(tl.uint8), mask=inside[:, None])
        tl.store(codes + place + 16, ((b & 15) | ((d & 15) << 4)).to(tl.uint8), mask=inside[:, None])
        top = (a >> 4) | ((b >> 4) << 2) | ((c >> 4) << 4) | ((d >> 4) << 6)
        tl.store(codes + place + 32, top.to(tl.uint8), mask=inside[:, None])


@triton.jit
def _give(out, rows, first, values, count, blocks, WIDTH: tl.constexpr, FULL: tl.constexpr):
    place = rows[:, None].to(tl.int64) * 64 + (first + tl.arange(0, WIDTH))[None, :]
    there = (rows < blocks)[:, None] & (tl.full((1, WIDTH), 1, tl.int1) if FULL else place < count)
    if out.dtype.element_ty == tl.float16:
        values = tl.where(values == values, tl.minimum(tl.maximum(values, -65504.0), 65504.0), values)
    tl.store(out + place, values.to(out.dtype.element_ty), mask=there)


@triton.jit
def _bytes(codes, rows, first, blocks, WIDTH: tl.constexpr, BITS: tl.constexpr):
    place = rows[:, None].to(tl.int64) * (8 * BITS) + (first + tl.arange(0, WIDTH))[None, :]
    return tl.load(codes + place, mask=(rows < blocks)[:, None], other=0).to(tl.int32)


@triton.jit
def _decode_plain(codes, scales, out, count, blocks, BITS: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.load(scales + rows, mask=rows < blocks, other=0)
    scale = (word << 16).to(tl.float32, bitcast=True)[:, None]
    minimum = (word & -65536).to(tl.float32, bitcast=True)[:, None]
    if BITS == 8:
        a = _bytes(codes, rows, 0, blocks, 64, BITS)
        _give(out, rows, 0, _value(a, scale, minimum), count, blocks, 64, FULL)
    elif BITS == 4:
        a = _bytes(codes, rows, 0, blocks, 32, BITS)
        _give(out, rows, 0, _value(a & 15, scale, minimum), count, blocks, 32, FULL)
        _give(out, rows, 32, _value(a >> 4, scale, minimum), count, blocks, 32, FULL)
    else:
        a = _bytes(codes, rows, 0, blocks, 16, BITS)
        b = _bytes(codes, rows, 16, blocks, 16, BITS)
        top = _bytes(codes, rows, 32, blocks, 16, BITS)
        _give(out, rows, 0, _value((a & 15) | ((top & 3) << 4), scale, minimum), count, blocks, 16, FULL)
        _give(out, rows, 16, _value((b & 15) | ((top & 12) << 2), scale, minimum), count, blocks, 16, FULL)
        _give(out, rows, 32, _value((a >> 4) | (top & 48), scale, minimum), count, blocks, 16, FULL)
        _give(out, rows, 48, _value((b >> 4) | ((top & 192) >> 2), scale, minimum), count, blocks, 16, FULL)


@triton.jit
def _columns(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[rows, width] as ``width`` tensors [rows], in order; each thread's own values, so nothing moves."""
    if WIDTH == 1:
        return (tl.reshape(x, (ROWS,)),)
    else:
        even, odd = tl.split(tl.reshape(x, (ROWS, WIDTH // 2, 2)))
        a = _columns(even, ROWS, WIDTH // 2)
        b = _columns(odd, ROWS, WIDTH // 2)
        joined = ()
        for at in tl.static_range(WIDTH // 2):
            joined = joined + (a[at], b[at])  # noqa: RUF005 - triton knows no unpacking
        return joined


@triton.jit
def _tile(columns, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The inverse: ``width`` tensors [rows] as one [rows, width]."""
    if WIDTH == 1:
        return tl.reshape(columns[0], (ROWS, 1))
    else:
        even = ()
        odd = ()
        for at in tl.static_range(WIDTH // 2):
            even = even + (columns[2 * at],)  # noqa: RUF005
            odd = odd + (columns[2 * at + 1],)  # noqa: RUF005
        pair = tl.join(_tile(even, ROWS, WIDTH // 2), _tile(odd, ROWS, WIDTH // 2))
        return tl.reshape(pair, (ROWS, WIDTH))


@triton.jit
def _stage(values, SIZE: tl.constexpr, AT: tl.constexpr):
    """(a, b) to (a + b, a − b) for values SIZE apart, with the signs of `rotation` in passing."""
    found = ()
    for at in tl.static_range(64):
        if ((at & SIZE) != 0) == TURNS[AT + at]:
            found = found + (values[at & ~SIZE] + values[at | SIZE],)  # noqa: RUF005
        else:
            found = found + (values[at & ~SIZE] - values[at | SIZE],)  # noqa: RUF005
    return found


@triton.jit
def _rotate(values):
    """H · (s ∘ x), 8 times too large."""
    values = _stage(values, 1, 0)
    values = _stage(values, 2, 64)
    values = _stage(values, 4, 128)
    values = _stage(values, 8, 192)
    values = _stage(values, 16, 256)
    return _stage(values, 32, 320)


@triton.jit
def _stage_back(values, SIZE: tl.constexpr, AT: tl.constexpr):
    found = ()
    for at in tl.static_range(64):
        a = values[at & ~SIZE]
        b = values[at | SIZE]
        if ((at & SIZE) != 0) == (WAYS[AT + at] == 2):
            found = found + (a + b,)  # noqa: RUF005
        elif WAYS[AT + at] == 0:
            found = found + (a - b,)  # noqa: RUF005
        else:
            found = found + (b - a,)  # noqa: RUF005
    return found


@triton.jit
def _rotate_back(values):
    """s ∘ (H · y), of values whose signs are changed where CHANGED says so."""
    values = _stage_back(values, 1, 0)
    values = _stage_back(values, 2, 64)
    values = _stage_back(values, 4, 128)
    values = _stage_back(values, 8, 192)
    values = _stage_back(values, 16, 256)
    return _stage_back(values, 32, 320)


@triton.jit
def _encode_rows(
    x, codes, scales, head, out, count, blocks,
    BITS: tl.constexpr, HEAD: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program == 0:
        _head(head, out, HEAD)
    rows = program * ROWS + tl.arange(0, ROWS)
    values = ()
    if x.dtype.element_ty == tl.int32:  # two values of bfloat16 each
        for first in tl.static_range(0, 32, WIDTH):
            place = rows[:, None].to(tl.int64) * 32 + (first + tl.arange(0, WIDTH))[None, :]
            pairs = tl.load(x + place, mask=(rows < blocks)[:, None], other=0)
            columns = _columns(pairs, ROWS, WIDTH)
            for pair in tl.static_range(WIDTH):
                even = (columns[pair] << 16).to(tl.float32, bitcast=True)
                odd = (columns[pair] & -65536).to(tl.float32, bitcast=True)
                values = values + (even, odd)  # noqa: RUF005
    else:
        for first in tl.static_range(0, 64, WIDTH):
            part, _ = _part(x, rows, first, count, WIDTH, FULL, blocks)
            values = values + _columns(part, ROWS, WIDTH)
    if ROTATED:
        values = _rotate(values)
    low = values[0]
    high = values[0]
    for at in tl.static_range(1, 64):
        low = _least(low, values[at])
        high = _most(high, values[at])
    # The transform is 8 times too large; a power of two more or less in the scale changes no rounding.
    size: tl.constexpr = 8.0 if ROTATED else 1.0
    minimum, inverse, mask, stored = _scale(low * (1 / size), high * (1 / size), BITS)
    tl.store(scales + rows, stored, mask=rows < blocks)
    minimum = minimum * size
    inverse = inverse * (1 / size)
    num_words: tl.constexpr = 2 * BITS
    mask = tl.where(mask == 0, 0, -1)
    words = ()
    for word in tl.static_range(num_words):
        found = tl.zeros((ROWS,), tl.int32)
        for byte in tl.static_range(3, -1, -1):
            if BITS == 4:
                found = (found << 4) + _raised(values[word * 4 + byte + 32], minimum, inverse)
            found = (found << BITS) + _raised(values[word * 4 + byte], minimum, inverse)
        words = words + ((found - RAISED[BITS]) & mask,)  # noqa: RUF005
    place = rows[:, None].to(tl.int64) * num_words + tl.arange(0, num_words)[None, :]
    tl.store(codes + place, _tile(words, ROWS, num_words), mask=(rows < blocks)[:, None])


@triton.jit
def _restored(words, scale, minimum, AT: tl.constexpr, BITS: tl.constexpr, ROTATED: tl.constexpr):
    """Value AT of each row. Its code stays in its place in the half word, 2^shift too large, and the scale is less."""
    byte: tl.constexpr = AT % 32 if BITS == 4 else AT
    shift: tl.constexpr = 8 * (byte % 2) + (4 if BITS == 4 and AT >= 32 else 0)
    half = words[byte // 4]
    if byte % 4 >= 2:
        half = half >> 16
    code = half & (((1 << BITS) - 1) << shift)
    factor: tl.constexpr = (-1.0 if ROTATED and CHANGED[AT] else 1.0) / (1 << shift)
    if ROTATED and CHANGED[AT]:
        return _value(code, scale * factor, -minimum)
    else:
        return _value(code, scale * factor, minimum)


@triton.jit
def _decode_rows(
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
        place = rows[:, None].to(tl.int64) * num_words + (first + tl.arange(0, 4))[None, :]
        part = tl.load(codes + place, mask=inside[:, None], other=0)
        words = words + _columns(part, ROWS, 4)
    values = ()
    for at in tl.static_range(64):
        values = values + (_restored(words, scale, minimum, at, BITS, ROTATED),)  # noqa: RUF005
    if ROTATED:
        values = _rotate_back(values)
    for first in tl.static_range(0, 64, WIDTH):
        part = ()
        for at in tl.static_range(WIDTH):
            part = part + (values[first + at],)  # noqa: RUF005
        _give(out, rows, first, _tile(part, ROWS, WIDTH), count, blocks, WIDTH, FULL)


def encode(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bits: int, rotated: bool, head: Any
) -> None:
    """Fill codes and scales (uint8) with a contiguous tensor's blocks, and the header where it is given."""
    count = values.numel()
    blocks = scales.numel() // 4
    header, out = head if head is not None else (codes, codes)
    size = header.numel() if head is not None else 0
    about = scales.view(torch.int32)
    options: dict[str, Any] = {"BITS": bits, "HEAD": size, "FULL": count % 64 == 0, "enable_fp_fusion": False}
    chosen = ROTATED_ENCODE[values.element_size()] if rotated else PLAIN_ENCODE
    if rotated or (not chosen["rows"] and bits != 6 and options["FULL"]):
        warps = chosen["num_warps"]
        if values.dtype == torch.bfloat16 and options["FULL"] and values.data_ptr() % 4 == 0:
            values = values.view(-1).view(torch.int32)  # two values a word: half as much to take apart
        row = 32 if values.dtype == torch.int32 else 64
        width = min(chosen.get("width", 0) or 16 // values.element_size(), row)
        options |= {"ROWS": 32 * warps, "WIDTH": width, "num_warps": warps, "ROTATED": rotated}
        words = codes.view(torch.int32)
        _encode_rows[(triton.cdiv(blocks, 32 * warps),)](values, words, about, header, out, count, blocks, **options)
        return
    rows, warps = (chosen["rows"], chosen["num_warps"]) if chosen["rows"] else (64, 4)
    options |= {"ROWS": rows, "num_warps": warps}
    _encode_plain[(triton.cdiv(blocks, rows),)](values, codes, about, header, out, count, blocks, **options)


def decode(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, bits: int, rotated: bool) -> None:
    """Fill a contiguous tensor with the values of its blocks."""
    count = out.numel()
    blocks = scales.numel() // 4
    about = scales.view(torch.int32)
    options: dict[str, Any] = {"BITS": bits, "FULL": count % 64 == 0, "enable_fp_fusion": False}
    chosen = ROTATED_DECODE if rotated else PLAIN_DECODE
    if rotated or (not chosen["rows"] and bits != 6):
        warps = chosen["num_warps"]
        width = chosen["width"] or 16 // out.element_size()
        options |= {"ROWS": 32 * warps, "WIDTH": width, "num_warps": warps, "ROTATED": rotated}
        words = codes.view(torch.int32)
        _decode_rows[(triton.cdiv(blocks, 32 * warps),)](words, about, out, count, blocks, **options)
        return
    rows, warps = (chosen["rows"], chosen["num_warps"]) if chosen["rows"] else (64, 4)
    options |= {"ROWS": rows, "num_warps": warps}
    _decode_plain[(triton.cdiv(blocks, rows),)](codes, about, out, count, blocks, **options)
