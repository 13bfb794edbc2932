"""Bit packing: blocks of 64 codes of b bits without gaps, split into planes of 8, 4, 2 or 1 bits.

    b = 8+4+2+1 as needed, low bits first:   4 → one plane of 4 · 6 → 4 and 2 · 3 → 2 and 1 · 12 → 8 and 4 · 9 → 8 and 1
    a plane of w bits has 8w bytes a block;  byte j = code j | code (j + 8w) << w | code (j + 16w) << 2w | …

    w = 4:   byte 0 = code 0 | code 32 << 4      byte 1 = code 1 | code 33 << 4   …   byte 31 = code 31 | code 63 << 4

This layout packs whole rows of adjacent values: vector instructions on a CPU, coalesced loads on a GPU.
"""

from __future__ import annotations

import torch

BLOCK = 64


def num_blocks(count: int) -> int:
    """Count the blocks for ``count`` values, the last one padded."""
    return -(-count // BLOCK)


def planes(bits: int) -> list[int]:
    """Return the widths of the planes of a code, low bits first: 6 → 4, 2."""
    widths = [8] * (bits // 8)
    return widths + [width for width in (4, 2, 1) if bits % 8 & width]


def packed_bytes(bits: int) -> int:
    """Return the size of one packed block."""
    return 8 * bits


def pack(codes: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Pack int32 codes [blocks, 64] into uint8 [blocks, 8 · bits]."""
    offset = shift = 0
    for width in planes(bits):
        size = 8 * width
        plane = (codes >> shift) & ((1 << width) - 1)
        parts = plane.view(-1, 8 // width, size)
        packed = parts[:, 0].clone()
        for k in range(1, 8 // width):
            packed |= parts[:, k] << (k * width)
        out[:, offset : offset + size] = packed.to(torch.uint8)
        offset, shift = offset + size, shift + width


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack uint8 [blocks, 8 · bits] into int32 codes [blocks, 64]."""
    codes = torch.zeros(packed.shape[0], BLOCK, dtype=torch.int32, device=packed.device)
    offset = shift = 0
    for width in planes(bits):
        size = 8 * width
        plane = packed[:, offset : offset + size].to(torch.int32)
        parts = codes.view(-1, 8 // width, size)
        for k in range(8 // width):
            parts[:, k] |= ((plane >> (k * width)) & ((1 << width) - 1)) << shift
        offset, shift = offset + size, shift + width
    return codes
