"""Casts to another dtype: none (raw bytes), bf16, and fp8 with one power-of-two scale per block.

    none   the tensor's bytes
    bf16   float32 rounded to nearest even; 16-bit dtypes unchanged
    fp8    e4m3 codes (one byte each) | one byte per block of 64: the power of two that scales its maximum to 224–448

fp8 has no Inf: NaN stays NaN, Inf becomes NaN, and the other values of the block are not affected.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stagewright.codecs.base import Codec, num_values, rounding_error
from stagewright.codecs.builtin.block import padded_rows
from stagewright.codecs.packing import BLOCK, num_blocks
from stagewright.codecs.registry import register


@register("none")
class NoCodec(Codec):
    """Raw bytes."""

    summary = "raw bytes"

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return num_values(shape) * dtype.itemsize

    def write(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        data = values.view(-1).view(torch.uint8)
        payload[: data.numel()] = data
        payload[data.numel() :] = 0

    def read(self, payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return payload[: self.payload_bytes(shape, dtype)].clone().view(dtype).view(tuple(shape))

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(values, dtype=torch.float32)


@register("bf")
class Bf16(NoCodec):
    """Cast to bfloat16."""

    summary = "float32 rounded to bfloat16; 16-bit dtypes unchanged"

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return num_values(shape) * 2

    def write(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        if values.dtype is torch.float32:  # one NaN pattern: every device writes the same bytes
            values = values.to(torch.bfloat16).view(torch.int16).masked_fill_(values.isnan(), 0x7FC0)
        super().write(values, payload)

    def read(self, payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        sent_dtype = torch.bfloat16 if dtype is torch.float32 else dtype
        return super().read(payload, shape, sent_dtype).to(dtype)

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        if values.dtype is not torch.float32:
            return super().bound(values)
        return values.abs() * 2.0**-8 + 2.0**-133


_EXPONENT, _MANTISSA = 0x7F800000, 0x007FFFFF
_LARGEST = 0x00600000  # the mantissa of 1.75: e4m3's largest value is 1.75 · 2^8


@register("fp")
class Fp8(Codec):
    """Cast to float8 e4m3 with a scale per block."""

    summary = "float8 e4m3 with a power-of-two scale per block of 64"

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return num_blocks(num_values(shape)) * (BLOCK + 1)

    def write(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        rows = padded_rows(values)
        blocks = rows.shape[0]
        finite = torch.where(rows.isfinite(), rows.abs(), 0.0)
        largest = finite.amax(1).view(torch.int32) if blocks else torch.zeros(0, dtype=torch.int32, device=rows.device)
        exponent = (largest & _EXPONENT) >> 23  # biased by 127; 0 where all values are below 2^-126
        exponent = exponent + ((largest & _MANTISSA) > _LARGEST).to(torch.int32)
        power = (exponent - 8).clamp(1, 246)  # exponent of the scale, biased; its inverse must not overflow
        inverse = ((254 - power) << 23).view(torch.float32)
        codes = (rows * inverse[:, None]).clamp(-448.0, 448.0).masked_fill(rows.isinf(), torch.nan)
        data = codes.to(torch.float8_e4m3fn).view(torch.uint8).masked_fill(~rows.isfinite(), 0x7F)
        payload[: blocks * BLOCK].view(blocks, BLOCK).copy_(data)
        payload[blocks * BLOCK : blocks * (BLOCK + 1)] = power.to(torch.uint8)
        payload[blocks * (BLOCK + 1) :] = 0

    def read(self, payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = num_values(shape)
        blocks = num_blocks(count)
        codes = payload[: blocks * BLOCK].view(torch.float8_e4m3fn).float().view(blocks, BLOCK)
        power = payload[blocks * BLOCK : blocks * (BLOCK + 1)].to(torch.int32)
        scale = (power.clamp(1, 254) << 23).view(torch.float32)
        return (codes * scale[:, None]).view(-1)[:count].to(dtype).view(tuple(shape))

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        rows = padded_rows(values)
        largest = torch.where(rows.isfinite(), rows.abs(), 0.0).amax(1, keepdim=True) if len(rows) else rows[:, :1]
        # Four significant bits; below 2^-6 of the scale steps are uniform, 2^-9 of it; the scale is at most max/224.
        error = rows.abs() * 2.0**-4 + largest * (2.0**-10 / 224) + 2.0**-126
        return error.view(-1)[: values.numel()].view(values.shape) + rounding_error(values)
