"""block8, block6, block4: every 64 values between their own minimum and maximum.

    payload:   │ codes of block 0, 8·b bytes │ codes of block 1 │ … │ scale, minimum of block 0 │ of block 1 │ …

8.5, 6.5 and 4.5 bits a value. `affine` says what a code is, `packing` where its bits are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stagewright.codecs.affine import Affine, dequantise, quantise, step_bound
from stagewright.codecs.base import Codec, aligned, header_tensor, num_values, rounding
from stagewright.codecs.kernels import select as kernels
from stagewright.codecs.name import CodecName
from stagewright.codecs.packing import BLOCK, num_blocks, pack, packed_bytes, unpack
from stagewright.codecs.registry import register
from stagewright.codecs.rotation import rotate, rotate_back

__all__ = ["LARGEST", "BlockCodec", "padded_rows", "spread"]

LARGEST = {torch.float16: 65504.0}
"""Where a rounded value could leave a type's range, the range's end."""


def padded_rows(values: torch.Tensor) -> torch.Tensor:
    """A tensor's values as float32 [blocks, 64], zeros behind the last."""
    flat = values.detach().reshape(-1).float()
    blocks = num_blocks(flat.numel())
    return torch.nn.functional.pad(flat, (0, blocks * BLOCK - flat.numel())).view(blocks, BLOCK)


def spread(rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One number a block, [blocks, 1], given to each value of a tensor."""
    return rows.expand(-1, BLOCK).reshape(-1)[: values.numel()].view(values.shape)


@register("block")
class BlockCodec(Codec):
    """Blocks as they are, or rotated."""

    rotated = False
    """Whether each block is rotated first."""

    def __init__(self, name: CodecName) -> None:
        super().__init__(name.text)
        self.bits = int(name.numbers[0])
        self.summary = f"{self.bits} bits between the minimum and maximum of every 64 values"

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return num_blocks(num_values(shape)) * (packed_bytes(self.bits) + 4)

    def write(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        count = values.numel()
        blocks, size = num_blocks(count), packed_bytes(self.bits)
        codes, rest = payload[: blocks * size], payload[blocks * size :]
        fast = kernels.encoder(values)
        if fast is not None:
            fast(values, codes, rest[: blocks * 4], self.bits, self.rotated, None)
        else:
            rows = padded_rows(values)
            # A rotated block has no padding: the zeros behind the last value are spread over all of it.
            found = (
                quantise(rotate(rows), self.bits, blocks * BLOCK) if self.rotated else quantise(rows, self.bits, count)
            )
            pack(found.codes, self.bits, codes.view(blocks, size))
            rest[: blocks * 4].view(torch.int32).copy_(found.scales)
        rest[blocks * 4 :] = 0

    def read(self, payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._take(payload, tuple(shape), dtype, None)

    def _fill(self, values: torch.Tensor, out: torch.Tensor, header: bytes) -> None:
        if out.device.type != "cuda":
            super()._fill(values, out, header)
            return
        fast = kernels.encoder(values)
        if fast is None:
            super()._fill(values, out, header)
            return
        blocks, size = num_blocks(values.numel()), packed_bytes(self.bits)
        start = len(header)
        codes, scales = out[start : start + blocks * size], out[start + blocks * size :]
        if aligned(blocks * 4) != blocks * 4:  # the padding behind the scales: only where blocks are no multiple of 4
            scales[blocks * 4 :] = 0
        fast(values, codes, scales[: blocks * 4], self.bits, self.rotated, (header_tensor(header, out.device), out))

    def _take(
        self, payload: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, out: torch.Tensor | None
    ) -> torch.Tensor:
        count = num_values(shape)
        blocks, size = num_blocks(count), packed_bytes(self.bits)
        codes = payload[: blocks * size]
        scales = payload[blocks * size : blocks * (size + 4)]
        fast = kernels.decoder(payload, dtype)
        if fast is not None:
            if out is None:
                out = torch.empty(shape, dtype=dtype, device=payload.device)
            fast(codes, scales, out, self.bits, self.rotated)
            return out
        found = Affine(unpack(codes.view(blocks, size), self.bits), scales.clone().view(torch.int32))
        rows = dequantise(found)
        flat = (rotate_back(rows) if self.rotated else rows).view(-1)[:count]
        if dtype is torch.float16:
            flat = flat.clamp(-LARGEST[dtype], LARGEST[dtype])
        values = flat.to(dtype).view(shape)
        return values if out is None else out.copy_(values)

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        rows = padded_rows(values)
        if not rows.numel():
            return torch.zeros_like(values, dtype=torch.float32)
        if self.rotated:
            # Half a step for each of 64 rotated values at most; a rotation keeps lengths: 8 half steps in all.
            turned = rotate(rows)
            length = turned.norm(dim=1, keepdim=True)
            found = 4 * step_bound(turned, self.bits) + length * 2.0**-18
        else:
            real = rows
            if values.numel() % BLOCK:
                real = rows.clone()
                real[-1, values.numel() % BLOCK :] = rows[-1, values.numel() % BLOCK - 1]
            found = step_bound(real, self.bits) / 2 + real.abs().amax(1, keepdim=True) * 2.0**-20
        return spread(found, values) + rounding(values)
