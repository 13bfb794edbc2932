"""sort{Q}+{S}: sort quantization, the published baseline: 2^S groups of equally many sorted values, Q bits in each.

    sorted:   ▁▁▁▂▂▂ │ ▂▃▃▃▃▄ │ ▄▅▅▆▆▇ │ ▇█████      S = 2: 4 groups, each with its minimum and step in float32
    code      group · 2^Q + round((x − minimum) / step), at the value's position; Q + S bits, packed

    payload:  │ codes, 8·(Q+S) bytes for 64 values │ minimum, step of group 0 │ of group 1 │ …

Equal values are assigned to groups in the order of their positions. A group that contains NaN or Inf (they sort to the
ends) decodes as NaN. The published code sends 12-bit codes as 16 bits and 4-bit codes as 8; here they are packed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stagewright.codecs.base import Codec, num_values, rounding_error
from stagewright.codecs.builtin.block import to_dtype
from stagewright.codecs.name import CodecName
from stagewright.codecs.packing import BLOCK, num_blocks, pack, packed_bytes, unpack
from stagewright.codecs.registry import register


@register("sort")
class SortCodec(Codec):
    """Sort quantization."""

    def __init__(self, name: CodecName) -> None:
        super().__init__(name)
        self.value_bits, self.split_bits = (int(number) for number in name.numbers)
        self.bits = self.value_bits + self.split_bits
        self.summary = f"{self.value_bits} bits per value in each of {2**self.split_bits} groups of sorted values"

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return num_blocks(num_values(shape)) * packed_bytes(self.bits) + self._groups(num_values(shape)) * 8

    def _groups(self, count: int) -> int:
        return 1 << self.split_bits if count else 0

    def _sorted(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the positions in sorted order, the group of each, and the groups' minima and steps."""
        ordered, positions = torch.sort(flat, stable=True)
        count, groups = flat.numel(), self._groups(flat.numel())
        size, num_larger = divmod(count, groups)
        sizes = [size + (index < num_larger) for index in range(groups)]
        ends = torch.tensor(sizes, device=flat.device).cumsum(0)
        group = torch.repeat_interleave(torch.arange(groups, device=flat.device), ends.diff(prepend=ends.new_zeros(1)))
        minima = ordered[(ends - torch.tensor(sizes, device=flat.device)).clamp(max=count - 1)]
        steps = (ordered[(ends - 1).clamp(min=0)] - minima).clamp(min=0) / ((1 << self.value_bits) - 1)
        return positions, group, minima, steps

    def write(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        flat = values.view(-1).float() + 0.0  # -0 becomes 0
        count = flat.numel()
        blocks, size = num_blocks(count), packed_bytes(self.bits)
        payload[blocks * size :] = 0
        if not count:
            return
        positions, group, minima, steps = self._sorted(flat)
        is_finite = steps < torch.inf
        steps = torch.where(is_finite, steps, torch.nan)
        minima = torch.where(is_finite, minima, 0.0)
        step = steps[group]
        level = torch.where(step > 0, torch.round((flat[positions] - minima[group]) / step), 0.0)
        level = level.nan_to_num(0.0).clamp(0, (1 << self.value_bits) - 1).to(torch.int32)
        codes = torch.zeros(blocks * BLOCK, dtype=torch.int32, device=flat.device)
        codes[positions] = (group << self.value_bits).to(torch.int32) | level
        pack(codes.view(blocks, BLOCK), self.bits, payload[: blocks * size].view(blocks, size))
        table = torch.stack((minima, steps), 1).view(-1).view(torch.int32)
        table = torch.where(table.view(torch.float32).isnan(), 0x7FC00000, table)
        payload[blocks * size : blocks * size + table.numel() * 4] = table.view(torch.uint8)

    def read(self, payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = num_values(shape)
        blocks, size = num_blocks(count), packed_bytes(self.bits)
        if not count:
            return torch.zeros(tuple(shape), dtype=dtype, device=payload.device)
        codes = unpack(payload[: blocks * size].view(blocks, size), self.bits).view(-1)[:count]
        table = payload[blocks * size : blocks * size + self._groups(count) * 8].clone().view(torch.float32).view(-1, 2)
        group = (codes >> self.value_bits).long()
        level = (codes & ((1 << self.value_bits) - 1)).float()
        flat = table[group, 0] + level * table[group, 1]
        return to_dtype(flat, dtype).view(tuple(shape))

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        flat = values.detach().reshape(-1).float()
        error = torch.zeros_like(flat)
        if flat.numel():
            positions, group, _, steps = self._sorted(flat)
            error[positions] = steps[group] * (0.5 + 2.0**-10)
            error = error + flat.abs().amax() * 2.0**-21
        return error.view(values.shape) + rounding_error(values)
