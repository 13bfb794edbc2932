"""topk:p: the p percent of largest magnitude in 16 bits each; all others are zero.

    payload:   │ kept values, bf16 (fp16 of fp16), in the order of their places │ a bit a value, or int32 places │

Whichever way of saying where they are is smaller for the shape. Of equal magnitudes the first are kept; NaN and Inf
count as larger than every number, so they are kept first and arrive as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from stagewright.codecs.base import Codec, num_values, rounding
from stagewright.codecs.name import CodecName
from stagewright.codecs.registry import register
from stagewright.errors import CorruptMessage

__all__ = ["TopK"]


@register("topk")
class TopK(Codec):
    """The largest values alone."""

    def __init__(self, name: CodecName) -> None:
        super().__init__(name.text)
        self.percent = float(name.numbers[0])
        self.summary = f"the {self.percent:g} % of largest magnitude, in 16 bits"

    def _kept(self, count: int) -> int:
        return min(count, math.ceil(count * self.percent / 100))

    def _is_map(self, count: int) -> bool:
        return -(-count // 8) <= 4 * self._kept(count)

    def _value_bytes(self, count: int) -> int:
        return -(-2 * self._kept(count) // 4) * 4

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        count = num_values(shape)
        where = -(-count // 8) if self._is_map(count) else 4 * self._kept(count)
        return self._value_bytes(count) + where

    def write(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        flat = values.view(-1)
        count = flat.numel()
        kept, start = self._kept(count), self._value_bytes(count)
        payload.zero_()
        if not count:
            return
        magnitude = flat.float().view(torch.int32) & 0x7FFFFFFF
        places = torch.sort(magnitude, descending=True, stable=True).indices[:kept].sort().values
        chosen = flat[places]
        if values.dtype is torch.float32:
            nan = chosen.isnan()
            chosen = chosen.to(torch.bfloat16).view(torch.int16).masked_fill(nan, 0x7FC0)
        payload[: 2 * kept] = chosen.view(torch.uint8)
        if self._is_map(count):
            bits = torch.zeros(-(-count // 8) * 8, dtype=torch.uint8, device=flat.device)
            bits[places] = 1
            weights = 2 ** torch.arange(8, dtype=torch.uint8, device=flat.device)
            payload[start : start + bits.numel() // 8] = (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
        else:
            payload[start : start + 4 * kept] = places.to(torch.int32).view(torch.uint8)

    def read(self, payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = num_values(shape)
        kept, start = self._kept(count), self._value_bytes(count)
        flat = torch.zeros(count, dtype=dtype, device=payload.device)
        if not count:
            return flat.view(tuple(shape))
        carried = torch.bfloat16 if dtype is torch.float32 else dtype
        chosen = payload[: 2 * kept].clone().view(carried)
        if self._is_map(count):
            packed = payload[start : start + -(-count // 8)]
            bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=payload.device)) & 1
            places = bits.view(-1)[:count].nonzero().view(-1)
            if places.numel() != kept:
                raise CorruptMessage(f"codec {self.name} keeps {kept} of {count} values, the message {places.numel()}")
        else:
            places = payload[start : start + 4 * kept].clone().view(torch.int32).long()
            if payload.device.type == "cpu" and not bool(((places >= 0) & (places < count)).all()):
                raise CorruptMessage(f"codec {self.name}: the message has values outside of the {count} that there are")
            places = places.clamp(0, count - 1)
        flat[places] = chosen.to(dtype)
        return flat.view(tuple(shape))

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        flat = values.detach().reshape(-1).float().abs()
        if not flat.numel():
            return torch.zeros_like(values, dtype=torch.float32)
        border = torch.sort(flat, descending=True).values[self._kept(flat.numel()) - 1]
        found = torch.minimum(flat, border) + flat * 2.0**-8 + 2.0**-133  # the least of bfloat16
        return found.view(values.shape) + rounding(values)
