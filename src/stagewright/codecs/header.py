"""The header of every message: it identifies codec, shape and dtype, so that no other message is mistaken for it.

     0        4         5       6       7       8            12          16                24             32
    ┌────────┬─────────┬───────┬───────┬───────┬────────────┬───────────┬─────────────────┬──────────────┬─────────────┐
    │ "SWCB" │ version │ dtype │ dims  │ check │ crc32(name)│ 0         │ payload bytes   │ checksum     │ int64 sizes │
    └────────┴─────────┴───────┴───────┴───────┴────────────┴───────────┴─────────────────┴──────────────┴─────────────┘
    little-endian, zeros up to a multiple of 64 bytes, then the payload

Everything but the checksum follows from codec, shape and dtype: both workers compare it when a link is set up. A
checked message also carries the checksum of its payload, a constant + Σ word_i · (2i + 1) over its 64-bit words,
mod 2^64: a change in any single word changes it. In an unchecked message the field is zero, and the host reads nothing.
"""

from __future__ import annotations

import struct
import zlib
from functools import lru_cache

import torch

from stagewright.errors import CorruptMessage, UsageError

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The dtypes that codecs accept, with their number in the header."""

MAGIC, VERSION = b"SWCB", 1
_ALIGN = 64  # of the payload, for whole vectors on every device
_FIXED = struct.Struct("<4sBBBBIIQQ")
_CHECKED_OFFSET, _CHECKSUM_OFFSET = 7, 24
_ZERO_CHECKSUM = 0x5743_4253  # checksum of an all-zero payload: a checked message never looks like an unchecked one
_FIELDS = ("magic", "version", "dtype", "number of dimensions", "flags", "codec", "reserved", "payload size", "")


def header_bytes(num_dims: int) -> int:
    """Return the size of a header."""
    return -(-(_FIXED.size + 8 * num_dims) // _ALIGN) * _ALIGN


@lru_cache(maxsize=1024)
def build_header(name: str, shape: tuple[int, ...], dtype: torch.dtype, payload_bytes: int) -> bytes:
    """Build the header of an unchecked message."""
    if dtype not in DTYPES:
        accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise UsageError(
            f"codecs accept {accepted}, not {str(dtype).removeprefix('torch.')}; send such tensors without a codec"
        )
    fixed = _FIXED.pack(MAGIC, VERSION, DTYPES[dtype], len(shape), 0, zlib.crc32(name.encode()), 0, payload_bytes, 0)
    return (fixed + struct.pack(f"<{len(shape)}q", *shape)).ljust(header_bytes(len(shape)), b"\0")


def checksum(payload: torch.Tensor) -> torch.Tensor:
    """Return the checksum of a payload (a multiple of 8 bytes) as one int64 on its device."""
    words = payload.view(torch.int64)
    weights = torch.arange(words.numel(), device=payload.device, dtype=torch.int64).mul_(2).add_(1)
    return weights.mul_(words).sum().add_(_ZERO_CHECKSUM)


def write_checksum(buffer: torch.Tensor, start: int) -> None:
    """Turn a message, whose payload begins at ``start``, into a checked one."""
    buffer[_CHECKED_OFFSET] = 1
    buffer[_CHECKSUM_OFFSET : _CHECKSUM_OFFSET + 8].view(torch.int64).copy_(checksum(buffer[start:]))


def check_header(buffer: torch.Tensor, expected: bytes, description: str) -> None:
    """Raise CorruptMessage unless the message has the expected header and, if it carries one, a correct checksum."""
    if buffer.dtype is not torch.uint8 or buffer.ndim != 1 or buffer.numel() < len(expected):
        raise CorruptMessage(
            f"a message for {description} must be one-dimensional uint8 with at least {len(expected)} bytes, got "
            f"{buffer.dtype} of shape {tuple(buffer.shape)}: was it truncated?"
        )
    header = bytearray(buffer[: len(expected)].cpu().numpy().tobytes())
    stored_checksum = struct.unpack_from("<q", header, _CHECKSUM_OFFSET)[0]
    is_checked = header[_CHECKED_OFFSET]
    header[_CHECKED_OFFSET] = 0
    header[_CHECKSUM_OFFSET : _CHECKSUM_OFFSET + 8] = bytes(8)
    if bytes(header) != expected or is_checked not in (0, 1) or (not is_checked and stored_checksum):
        raise CorruptMessage(f"not a message for {description}: {_describe_difference(bytes(header), expected)}")
    payload = buffer[len(expected) :]
    size = struct.unpack_from("<Q", expected, 16)[0]
    if payload.numel() != size:
        raise CorruptMessage(f"a message for {description} has a payload of {payload.numel()} bytes, expected {size}")
    if is_checked and int(checksum(payload)) != stored_checksum:
        raise CorruptMessage(f"a message for {description} was corrupted in transit: its checksum does not match")


def _describe_difference(header: bytes, expected: bytes) -> str:
    """Name the first field that differs, with both values."""
    for field, actual, wanted in zip(_FIELDS, _FIXED.unpack_from(header), _FIXED.unpack_from(expected), strict=True):
        if actual != wanted:
            return f"its {field} is {actual!r}, expected {wanted!r}"
    num_dims = expected[6]
    shape, wanted_shape = (struct.unpack_from(f"<{num_dims}q", data, _FIXED.size) for data in (header, expected))
    return f"its shape is {shape}, expected {wanted_shape}" if shape != wanted_shape else "its flags or padding differ"
