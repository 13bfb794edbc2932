"""topk:p: the p percent of values with the largest magnitude, in 16 bits each; all others become zero.

    payload:   │ kept values, bf16 (fp16 for fp16), by position │ a bitmap of positions, or int32 indices │

The smaller of bitmap and indices is used. Among equal magnitudes the first are kept. NaN and Inf rank above every
number, so they are kept first and arrive unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from stagewright.codecs.base import Codec, num_values, rounding_error
from stagewright.codecs.name import CodecName
from stagewright.codecs.registry import register
from stagewright.errors import CorruptMessage


@register("topk")
class TopK(Codec):
    """Top-k sparsification."""

    def __init__(self, name: CodecName) -> None:
        super().__init__(name)
        self.percent = float(name.numbers[0])
        self.summary = f"the {self.percent:g} % of values with the largest magnitude, in 16 bits"

    def _num_kept(self, count: int) -> int:
        return min(count, math.ceil(count * self.percent / 100))

    def _uses_bitmap(self, count: int) -> bool:
        return -(-count // 8) <= 4 * self._num_kept(count)

    def _value_bytes(self, count: int) -> int:
        return -(-2 * self._num_kept(count) // 4) * 4

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        count = num_values(shape)
        index_bytes = -(-count // 8) if self._uses_bitmap(count) else 4 * self._num_kept(count)
        return self._value_bytes(count) + index_bytes

    def write(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        flat = values.view(-1)
        count = flat.numel()
        kept, start = self._num_kept(count), self._value_bytes(count)
        payload.zero_()
        if not count:
            return
        magnitude = flat.float().view(torch.int32) & 0x7FFFFFFF
        indices = torch.sort(magnitude, descending=True, stable=True).indices[:kept].sort().values
        kept_values = flat[indices]
        if values.dtype is torch.float32:
            nan = kept_values.isnan()
            kept_values = kept_values.to(torch.bfloat16).view(torch.int16).masked_fill(nan, 0x7FC0)
        payload[: 2 * kept] = kept_values.view(torch.uint8)
        if self._uses_bitmap(count):
            bits = torch.zeros(-(-count // 8) * 8, dtype=torch.uint8, device=flat.device)
            bits[indices] = 1
            weights = 2 ** torch.arange(8, dtype=torch.uint8, device=flat.device)
            payload[start : start + bits.numel() // 8] = (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
        else:
            payload[start : start + 4 * kept] = indices.to(torch.int32).view(torch.uint8)

    def read(self, payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = num_values(shape)
        kept, start = self._num_kept(count), self._value_bytes(count)
        flat = torch.zeros(count, dtype=dtype, device=payload.device)
        if not count:
            return flat.view(tuple(shape))
        sent_dtype = torch.bfloat16 if dtype is torch.float32 else dtype
        kept_values = payload[: 2 * kept].clone().view(sent_dtype)
        if self._uses_bitmap(count):
            packed = payload[start : start + -(-count // 8)]
            bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=payload.device)) & 1
            indices = bits.view(-1)[:count].nonzero().view(-1)
            if indices.numel() != kept:
                raise CorruptMessage(
                    f"codec {self.name} keeps {kept} of {count} values, but the message has {indices.numel()}"
                )
        else:
            indices = payload[start : start + 4 * kept].clone().view(torch.int32).long()
            if payload.device.type == "cpu" and not bool(((indices >= 0) & (indices < count)).all()):
                raise CorruptMessage(f"codec {self.name}: the message has an index outside the {count} values")
            indices = indices.clamp(0, count - 1)
        flat[indices] = kept_values.to(dtype)
        return flat.view(tuple(shape))

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        flat = values.detach().reshape(-1).float().abs()
        if not flat.numel():
            return torch.zeros_like(values, dtype=torch.float32)
        threshold = torch.sort(flat, descending=True).values[self._num_kept(flat.numel()) - 1]
        error = torch.minimum(flat, threshold) + flat * 2.0**-8 + 2.0**-133  # bfloat16's smallest value
        return error.view(values.shape) + rounding_error(values)
