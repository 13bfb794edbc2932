"""GPU kernels of the block codecs, in Triton: one launch per message, header included, with the same bytes as on a CPU.

    `triton_tiles`    a tile of rows per program, for blocks without rotation
    `triton_rows`     a row per thread, for rotated blocks

No arithmetic is fused (``enable_fp_fusion=False``) and divisions are IEEE's, otherwise a CPU could not produce the same
bytes. The host reads nothing.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton

from stagewright.codecs.kernels.triton_rows import decode_rows, encode_rows
from stagewright.codecs.kernels.triton_tiles import decode_tiles, encode_tiles

PLAIN_ENCODE = {"rows": 64, "num_warps": 4}
PLAIN_DECODE = {"rows": 0, "num_warps": 1, "width": 64}
ROTATED_ENCODE = {2: {"num_warps": 4, "width": 0}, 4: {"num_warps": 1, "width": 64}}
ROTATED_DECODE = {"num_warps": 1, "width": 64}
"""Launch configurations, tuned on an H200 with ``benchmarks/codec_cuda.py --variants``.

``rows`` per program (0: one row per thread, as for rotated blocks), warps, and ``width``: how many elements of a
thread's row are loaded or stored at once through shared memory (0: 16 bytes, directly). Shared memory is faster where
memory bandwidth is the limit, not arithmetic; for rotated encoding that depends on the bytes per value."""


def encode(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bits: int, rotated: bool, header: Any
) -> None:
    """Encode a contiguous tensor into codes and scales (uint8).

    ``header``, if given, holds the header's bytes and the message to write them to.
    """
    count = values.numel()
    blocks = scales.numel() // 4
    header_bytes, out = header if header is not None else (codes, codes)
    size = header_bytes.numel() if header is not None else 0
    scale_words = scales.view(torch.int32)
    options: dict[str, Any] = {"BITS": bits, "HEAD": size, "FULL": count % 64 == 0, "enable_fp_fusion": False}
    config = ROTATED_ENCODE[values.element_size()] if rotated else PLAIN_ENCODE
    if rotated or (not config["rows"] and bits != 6 and options["FULL"]):
        warps = config["num_warps"]
        if values.dtype == torch.bfloat16 and options["FULL"] and values.data_ptr() % 4 == 0:
            values = values.view(-1).view(torch.int32)  # two values per word: half as many to split
        row = 32 if values.dtype == torch.int32 else 64
        width = min(config.get("width", 0) or 16 // values.element_size(), row)
        options |= {"ROWS": 32 * warps, "WIDTH": width, "num_warps": warps, "ROTATED": rotated}
        words = codes.view(torch.int32)
        encode_rows[(triton.cdiv(blocks, 32 * warps),)](
            values, words, scale_words, header_bytes, out, count, blocks, **options
        )
        return
    rows, warps = (config["rows"], config["num_warps"]) if config["rows"] else (64, 4)
    options |= {"ROWS": rows, "num_warps": warps}
    encode_tiles[(triton.cdiv(blocks, rows),)](values, codes, scale_words, header_bytes, out, count, blocks, **options)


def decode(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, bits: int, rotated: bool) -> None:
    """Decode codes and scales into a contiguous tensor."""
    count = out.numel()
    blocks = scales.numel() // 4
    scale_words = scales.view(torch.int32)
    options: dict[str, Any] = {"BITS": bits, "FULL": count % 64 == 0, "enable_fp_fusion": False}
    config = ROTATED_DECODE if rotated else PLAIN_DECODE
    if rotated or (not config["rows"] and bits != 6):
        warps = config["num_warps"]
        width = config["width"] or 16 // out.element_size()
        options |= {"ROWS": 32 * warps, "WIDTH": width, "num_warps": warps, "ROTATED": rotated}
        words = codes.view(torch.int32)
        decode_rows[(triton.cdiv(blocks, 32 * warps),)](words, scale_words, out, count, blocks, **options)
        return
    rows, warps = (config["rows"], config["num_warps"]) if config["rows"] else (64, 4)
    options |= {"ROWS": rows, "num_warps": warps}
    decode_tiles[(triton.cdiv(blocks, rows),)](codes, scale_words, out, count, blocks, **options)
