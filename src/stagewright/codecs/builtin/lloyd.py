"""lloyd3, lloyd2: after a rotation values are nearly normal, so a table made for the normal distribution fits all.

    payload:   │ codes, 8·b bytes a block │ … │ scale of block 0 (bf16) │ of block 1 │ …    3.25, 2.25 bits a value
    code       the nearest of the 2^b values of Lloyd and Max for N(0, 1), in units of the block's root mean square

The mean square is added up in a fixed order (neighbours first), so that every device gets the same. A block that holds
NaN or Inf has the scale NaN and codes 0 and decodes as NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stagewright.codecs.base import Codec, num_values, rounding
from stagewright.codecs.builtin.block import LARGEST, padded_rows, spread
from stagewright.codecs.name import CodecName
from stagewright.codecs.packing import BLOCK, num_blocks, pack, packed_bytes, unpack
from stagewright.codecs.registry import register
from stagewright.codecs.rotation import rotate, rotate_back

__all__ = ["LloydCodec"]

# Upper half of the tables; Max, "Quantizing for minimum distortion" (1960), computed again to six digits.
_LEVELS = {
    2: (0.452780, 1.510418),
    3: (0.245094, 0.756005, 1.343909, 2.151946),
}
_NAN = 0x7FC0


@register("lloyd")
class LloydCodec(Codec):
    """A table for normal values, after a rotation."""

    def __init__(self, name: CodecName) -> None:
        super().__init__(name.text)
        self.bits = int(name.numbers[0])
        self.summary = f"{self.bits} bits: the best table for normal values, after a rotation"
        upper = _LEVELS[self.bits]
        self._levels = [*(-one for one in reversed(upper)), *upper]
        self._borders = [(a + b) / 2 for a, b in zip(self._levels, self._levels[1:], strict=False)]

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return num_blocks(num_values(shape)) * (packed_bytes(self.bits) + 2)

    def write(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        turned = rotate(padded_rows(values))
        blocks, size = turned.shape[0], packed_bytes(self.bits)
        # In units of a power of two near the largest value, so that no square leaves float32.
        largest = turned.abs().amax(1) if blocks else turned[:, 0]
        power = (largest.view(torch.int32) >> 23).clamp(27, 250)
        squares = turned * ((254 - power) << 23).view(torch.float32)[:, None]
        squares = squares * squares
        while squares.shape[1] > 1:
            squares = squares[:, ::2] + squares[:, 1::2]
        root = torch.sqrt(squares[:, 0] * (1 / BLOCK)) * (power << 23).view(torch.float32)
        scale = root.to(torch.bfloat16).float()
        good = scale < torch.inf
        codes = torch.zeros_like(turned, dtype=torch.int32)
        for border in self._borders:
            codes += (turned > border * scale[:, None]).to(torch.int32)
        codes *= good.to(torch.int32)[:, None]
        pack(codes, self.bits, payload[: blocks * size].view(blocks, size))
        bits = torch.where(good, (scale.view(torch.int32) >> 16) & 0xFFFF, _NAN).to(torch.int16)
        payload[blocks * size : blocks * (size + 2)] = bits.view(torch.uint8)
        payload[blocks * (size + 2) :] = 0

    def read(self, payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = num_values(shape)
        blocks, size = num_blocks(count), packed_bytes(self.bits)
        codes = unpack(payload[: blocks * size].view(blocks, size), self.bits)
        scale = payload[blocks * size : blocks * (size + 2)].clone().view(torch.bfloat16).float()
        table = torch.tensor(self._levels, dtype=torch.float32, device=payload.device)
        flat = rotate_back(table[codes.long()] * scale[:, None]).view(-1)[:count]
        if dtype is torch.float16:
            flat = flat.clamp(-LARGEST[dtype], LARGEST[dtype])
        return flat.to(dtype).view(tuple(shape))

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        rows = padded_rows(values)
        length = rows.double().norm(dim=1, keepdim=True).float()
        # A value beyond the table loses less than itself, any other at most half the widest step times the scale.
        widest = max(b - a for a, b in zip(self._levels, self._levels[1:], strict=False)) / 2
        found = length * ((1 + widest**2) ** 0.5 * 1.02) + 2.0**-60
        return spread(found, values) + rounding(values)
