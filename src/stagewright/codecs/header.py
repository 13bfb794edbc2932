"""The head of every message: what it is, so that nothing else can be read as it.

     0        4         5       6       7       8            12          16                24             32
    ┌────────┬─────────┬───────┬───────┬───────┬────────────┬───────────┬─────────────────┬──────────────┬─────────────┐
    │ "SWCB" │ version │ dtype │ dims  │ check │ crc32(name)│ 0         │ payload's bytes │ checksum     │ int64 sizes │
    └────────┴─────────┴───────┴───────┴───────┴────────────┴───────────┴─────────────────┴──────────────┴─────────────┘
    little-endian, zeros up to a multiple of 64 bytes, then the payload

All but the checksum follows from codec, shape and dtype: two workers compare it when a link is set up, and in checking
mode each message carries the checksum of its payload, a constant + Σ word_i · (2i + 1) over its 64-bit words, mod 2^64:
a change in any one word changes it. Without checking mode that field is zero and nothing of a message is read on the
host.
"""

from __future__ import annotations

import struct
import zlib
from functools import lru_cache

import torch

from stagewright.errors import CorruptMessage, UsageError

__all__ = ["DTYPES", "check_header", "checksum", "header_bytes", "header_of", "write_checksum"]

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What a codec takes, and its number in the header."""

MAGIC, VERSION = b"SWCB", 1
_ALIGN = 64  # of the payload: whole vectors on every device
_FIXED = struct.Struct("<4sBBBBIIQQ")
_CHECKED_AT, _CHECKSUM_AT = 7, 24
_OF_ZEROS = 0x5743_4253  # the checksum of a payload of zeros: none looks like that of an unchecked message


def header_bytes(num_dims: int) -> int:
    """The size of a header."""
    return -(-(_FIXED.size + 8 * num_dims) // _ALIGN) * _ALIGN


@lru_cache(maxsize=1024)
def header_of(name: str, shape: tuple[int, ...], dtype: torch.dtype, payload_bytes: int) -> bytes:
    """The header of an unchecked message."""
    if dtype not in DTYPES:
        known = ", ".join(str(one).removeprefix("torch.") for one in DTYPES)
        raise UsageError(
            f"a codec takes {known}, not {str(dtype).removeprefix('torch.')}: send such tensors as they are"
        )
    fixed = _FIXED.pack(MAGIC, VERSION, DTYPES[dtype], len(shape), 0, zlib.crc32(name.encode()), 0, payload_bytes, 0)
    return (fixed + struct.pack(f"<{len(shape)}q", *shape)).ljust(header_bytes(len(shape)), b"\0")


def checksum(payload: torch.Tensor) -> torch.Tensor:
    """Of a payload whose size is a multiple of 8, as one int64 on its device."""
    words = payload.view(torch.int64)
    weights = torch.arange(words.numel(), device=payload.device, dtype=torch.int64).mul_(2).add_(1)
    return weights.mul_(words).sum().add_(_OF_ZEROS)


def write_checksum(buffer: torch.Tensor, start: int) -> None:
    """Turn a message into a checked one; its payload begins at ``start``."""
    buffer[_CHECKED_AT] = 1
    buffer[_CHECKSUM_AT : _CHECKSUM_AT + 8].view(torch.int64).copy_(checksum(buffer[start:]))


def check_header(buffer: torch.Tensor, expected: bytes, what: str) -> None:
    """Raise CorruptMessage unless the message is what was agreed and, if it carries one, its checksum is right."""
    if buffer.dtype is not torch.uint8 or buffer.ndim != 1 or buffer.numel() < len(expected):
        raise CorruptMessage(
            f"a message for {what} must be at least {len(expected)} bytes in one row, not {buffer.dtype} of shape "
            f"{tuple(buffer.shape)}: was it cut short?"
        )
    found = bytearray(buffer[: len(expected)].cpu().numpy().tobytes())
    carried = struct.unpack_from("<q", found, _CHECKSUM_AT)[0]
    is_checked = found[_CHECKED_AT]
    found[_CHECKED_AT] = 0
    found[_CHECKSUM_AT : _CHECKSUM_AT + 8] = bytes(8)
    if bytes(found) != expected or is_checked not in (0, 1) or (not is_checked and carried):
        raise CorruptMessage(f"not a message for {what}: {_difference(bytes(found), expected)}")
    payload = buffer[len(expected) :]
    size = struct.unpack_from("<Q", expected, 16)[0]
    if payload.numel() != size:
        raise CorruptMessage(f"a message for {what} has {payload.numel()} bytes behind its header instead of {size}")
    if is_checked and int(checksum(payload)) != carried:
        raise CorruptMessage(f"a message for {what} was damaged on its way: its checksum is not that of its bytes")


def _difference(found: bytes, expected: bytes) -> str:
    """Which field is wrong first, with both values."""
    names = (
        "magic",
        "version",
        "dtype",
        "number of dimensions",
        "flags",
        "codec",
        "reserved",
        "size of the payload",
        "",
    )
    pairs = zip(names, _FIXED.unpack_from(found), _FIXED.unpack_from(expected), strict=True)
    for name, one, other in pairs:
        if one != other:
            return f"its {name} is {one!r} instead of {other!r}"
    dims = expected[6]
    sizes = [struct.unpack_from(f"<{dims}q", one, _FIXED.size) for one in (found, expected)]
    return (
        f"its shape is {sizes[0]} instead of {sizes[1]}" if sizes[0] != sizes[1] else "its flags or padding are wrong"
    )
