"""sort{Q}+{S}: sorted values in 2^S groups of equal population, Q bits inside each: the published baseline, packed.

    sorted:   ▁▁▁▂▂▂ │ ▂▃▃▃▃▄ │ ▄▅▅▆▆▇ │ ▇█████      S = 2: 4 groups, each with its minimum and step in float32
    code      group · 2^Q + round((x − minimum) / step), in the value's own place; Q + S bits, truly packed

    payload:  │ codes, 8·(Q+S) bytes for 64 values │ minimum, step of group 0 │ of group 1 │ …

Equal values go to groups in the order of their places. A group that holds NaN or Inf (they sort to the ends) decodes as
NaN. In the published code 12-bit codes travel as 16 bits and 4-bit ones as 8; here their size is what their name says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stagewright.codecs.base import Codec, num_values, rounding
from stagewright.codecs.builtin.block import LARGEST
from stagewright.codecs.name import CodecName
from stagewright.codecs.packing import BLOCK, num_blocks, pack, packed_bytes, unpack
from stagewright.codecs.registry import register

__all__ = ["SortCodec"]


@register("sort")
class SortCodec(Codec):
    """Sort quantisation."""

    def __init__(self, name: CodecName) -> None:
        super().__init__(name.text)
        self.value_bits, self.split_bits = (int(one) for one in name.numbers)
        self.bits = self.value_bits + self.split_bits
        self.summary = f"{self.value_bits} bits inside each of {2**self.split_bits} groups of sorted values"

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return num_blocks(num_values(shape)) * packed_bytes(self.bits) + self._groups(num_values(shape)) * 8

    def _groups(self, count: int) -> int:
        return 1 << self.split_bits if count else 0

    def _sorted(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Places in sorted order, the group of each, and minima and steps of the groups."""
        ordered, places = torch.sort(flat, stable=True)
        count, groups = flat.numel(), self._groups(flat.numel())
        short, longer = divmod(count, groups)
        sizes = [short + (at < longer) for at in range(groups)]
        ends = torch.tensor(sizes, device=flat.device).cumsum(0)
        group = torch.repeat_interleave(torch.arange(groups, device=flat.device), ends.diff(prepend=ends.new_zeros(1)))
        minima = ordered[(ends - torch.tensor(sizes, device=flat.device)).clamp(max=count - 1)]
        steps = (ordered[(ends - 1).clamp(min=0)] - minima).clamp(min=0) / ((1 << self.value_bits) - 1)
        return places, group, minima, steps

    def write(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        flat = values.view(-1).float() + 0.0  # -0 and 0 are one value
        count = flat.numel()
        blocks, size = num_blocks(count), packed_bytes(self.bits)
        payload[blocks * size :] = 0
        if not count:
            return
        places, group, minima, steps = self._sorted(flat)
        good = steps < torch.inf
        steps = torch.where(good, steps, torch.nan)
        minima = torch.where(good, minima, 0.0)
        step = steps[group]
        inside = torch.where(step > 0, torch.round((flat[places] - minima[group]) / step), 0.0)
        inside = inside.nan_to_num(0.0).clamp(0, (1 << self.value_bits) - 1).to(torch.int32)
        codes = torch.zeros(blocks * BLOCK, dtype=torch.int32, device=flat.device)
        codes[places] = (group << self.value_bits).to(torch.int32) | inside
        pack(codes.view(blocks, BLOCK), self.bits, payload[: blocks * size].view(blocks, size))
        about = torch.stack((minima, steps), 1).view(-1).view(torch.int32)
        about = torch.where(about.view(torch.float32).isnan(), 0x7FC00000, about)
        payload[blocks * size : blocks * size + about.numel() * 4] = about.view(torch.uint8)

    def read(self, payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = num_values(shape)
        blocks, size = num_blocks(count), packed_bytes(self.bits)
        if not count:
            return torch.zeros(tuple(shape), dtype=dtype, device=payload.device)
        codes = unpack(payload[: blocks * size].view(blocks, size), self.bits).view(-1)[:count]
        about = payload[blocks * size : blocks * size + self._groups(count) * 8].clone().view(torch.float32).view(-1, 2)
        group = (codes >> self.value_bits).long()
        inside = (codes & ((1 << self.value_bits) - 1)).float()
        flat = about[group, 0] + inside * about[group, 1]
        if dtype is torch.float16:
            flat = flat.clamp(-LARGEST[dtype], LARGEST[dtype])
        return flat.to(dtype).view(tuple(shape))

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        flat = values.detach().reshape(-1).float()
        found = torch.zeros_like(flat)
        if flat.numel():
            places, group, _, steps = self._sorted(flat)
            found[places] = steps[group] * (0.5 + 2.0**-10)
            found = found + flat.abs().amax() * 2.0**-21
        return found.view(values.shape) + rounding(values)
