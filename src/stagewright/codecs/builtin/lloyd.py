"""lloyd3, lloyd2: Lloyd–Max quantization; rotated values are nearly normal, so one table for N(0, 1) fits all blocks.

    payload:   │ codes, 8·b bytes a block │ … │ scale of block 0 (bf16) │ of block 1 │ …    3.25, 2.25 bits per value
    code       the nearest of the 2^b Lloyd–Max levels for N(0, 1), in units of the block's RMS

The mean square is summed pairwise in a fixed order, so that every device gets the same result. A block that contains
NaN or Inf has scale NaN and codes 0 and decodes as NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stagewright.codecs.base import Codec, num_values, rounding_error
from stagewright.codecs.builtin.block import padded_rows, spread, to_dtype
from stagewright.codecs.name import CodecName
from stagewright.codecs.packing import BLOCK, num_blocks, pack, packed_bytes, unpack
from stagewright.codecs.registry import register
from stagewright.codecs.rotation import rotate, rotate_back

# Upper half of the tables in Max, "Quantizing for minimum distortion" (1960), recomputed to six digits.
_LEVELS = {2: (0.452780, 1.510418), 3: (0.245094, 0.756005, 1.343909, 2.151946)}
_NAN = 0x7FC0


@register("lloyd")
class LloydCodec(Codec):
    """Lloyd–Max quantization of rotated blocks."""

    def __init__(self, name: CodecName) -> None:
        super().__init__(name)
        self.bits = int(name.numbers[0])
        self.summary = f"{self.bits} bits per value: Lloyd–Max levels for normal values, in rotated blocks of 64"
        upper = _LEVELS[self.bits]
        self._levels = [*(-level for level in reversed(upper)), *upper]
        self._thresholds = [(a + b) / 2 for a, b in zip(self._levels, self._levels[1:], strict=False)]

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return num_blocks(num_values(shape)) * (packed_bytes(self.bits) + 2)

    def write(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        rotated = rotate(padded_rows(values))
        blocks, size = rotated.shape[0], packed_bytes(self.bits)
        # Scale by a power of two near the largest value, so that no square overflows float32.
        largest = rotated.abs().amax(1) if blocks else rotated[:, 0]
        power = (largest.view(torch.int32) >> 23).clamp(27, 250)
        squares = rotated * ((254 - power) << 23).view(torch.float32)[:, None]
        squares = squares * squares
        while squares.shape[1] > 1:
            squares = squares[:, ::2] + squares[:, 1::2]
        root = torch.sqrt(squares[:, 0] * (1 / BLOCK)) * (power << 23).view(torch.float32)
        scale = root.to(torch.bfloat16).float()
        is_finite = scale < torch.inf
        codes = torch.zeros_like(rotated, dtype=torch.int32)
        for threshold in self._thresholds:
            codes += (rotated > threshold * scale[:, None]).to(torch.int32)
        codes *= is_finite.to(torch.int32)[:, None]
        pack(codes, self.bits, payload[: blocks * size].view(blocks, size))
        bits = torch.where(is_finite, (scale.view(torch.int32) >> 16) & 0xFFFF, _NAN).to(torch.int16)
        payload[blocks * size : blocks * (size + 2)] = bits.view(torch.uint8)
        payload[blocks * (size + 2) :] = 0

    def read(self, payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = num_values(shape)
        blocks, size = num_blocks(count), packed_bytes(self.bits)
        codes = unpack(payload[: blocks * size].view(blocks, size), self.bits)
        scale = payload[blocks * size : blocks * (size + 2)].clone().view(torch.bfloat16).float()
        table = torch.tensor(self._levels, dtype=torch.float32, device=payload.device)
        flat = rotate_back(table[codes.long()] * scale[:, None]).view(-1)[:count]
        return to_dtype(flat, dtype).view(tuple(shape))

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        rows = padded_rows(values)
        norm = rows.double().norm(dim=1, keepdim=True).float()
        # Values beyond the table lose less than themselves, all others at most half the widest step times the scale.
        widest = max(b - a for a, b in zip(self._levels, self._levels[1:], strict=False)) / 2
        error = norm * ((1 + widest**2) ** 0.5 * 1.02) + 2.0**-60
        return spread(error, values) + rounding_error(values)
