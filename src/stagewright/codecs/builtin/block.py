"""block8, block6, block4: every 64 values quantized between their minimum and maximum; hadamard8, hadamard4: rotated.

    payload:   │ codes of block 0, 8·b bytes │ codes of block 1 │ … │ scale, minimum of block 0 │ of block 1 │ …

8.5, 6.5 and 4.5 bits per value. `affine` defines the codes, `packing` the position of their bits, `rotation` the
rotation. Rotation is best for tensors with outliers (transformer activations, gradients), and worse for tensors with
many exact zeros (after ReLU): `block` keeps zeros, rotation spreads the other values over them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stagewright.codecs.affine import Affine, dequantize, quantize, step_bound
from stagewright.codecs.base import Codec, aligned, header_tensor, num_values, rounding_error
from stagewright.codecs.kernels import select as kernels
from stagewright.codecs.name import CodecName
from stagewright.codecs.packing import BLOCK, num_blocks, pack, packed_bytes, unpack
from stagewright.codecs.registry import register
from stagewright.codecs.rotation import rotate, rotate_back

_MAX_FLOAT16 = 65504.0


def padded_rows(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as float32 [blocks, 64], padded with zeros."""
    flat = values.detach().reshape(-1).float()
    blocks = num_blocks(flat.numel())
    return torch.nn.functional.pad(flat, (0, blocks * BLOCK - flat.numel())).view(blocks, BLOCK)


def spread(rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Expand one number per block, [blocks, 1], to the values of a tensor."""
    return rows.expand(-1, BLOCK).reshape(-1)[: values.numel()].view(values.shape)


def to_dtype(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert decoded float32 values; rounding must not overflow float16."""
    return (values.clamp(-_MAX_FLOAT16, _MAX_FLOAT16) if dtype is torch.float16 else values).to(dtype)


@register("block")
class BlockCodec(Codec):
    """Affine quantization of blocks."""

    rotated = False

    def __init__(self, name: CodecName) -> None:
        super().__init__(name)
        self.bits = int(name.numbers[0])
        self.summary = f"{self.bits} bits per value between the minimum and maximum of each block of 64"

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return num_blocks(num_values(shape)) * (packed_bytes(self.bits) + 4)

    def write(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        count = values.numel()
        blocks, size = num_blocks(count), packed_bytes(self.bits)
        codes, rest = payload[: blocks * size], payload[blocks * size :]
        kernel = kernels.encoder(values)
        if kernel is not None:
            kernel(values, codes, rest[: blocks * 4], self.bits, self.rotated, None)
        else:
            rows = padded_rows(values)
            # Rotation spreads the padding over the whole block, so a rotated block has none.
            quantized = (
                quantize(rotate(rows), self.bits, blocks * BLOCK) if self.rotated else quantize(rows, self.bits, count)
            )
            pack(quantized.codes, self.bits, codes.view(blocks, size))
            rest[: blocks * 4].view(torch.int32).copy_(quantized.scales)
        rest[blocks * 4 :] = 0

    def read(self, payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._decode_payload(payload, tuple(shape), dtype, None)

    def _encode_into(self, values: torch.Tensor, out: torch.Tensor, header: bytes) -> None:
        kernel = kernels.encoder(values) if out.device.type == "cuda" else None
        if kernel is None:
            super()._encode_into(values, out, header)
            return
        blocks, size = num_blocks(values.numel()), packed_bytes(self.bits)
        start = len(header)
        codes, scales = out[start : start + blocks * size], out[start + blocks * size :]
        if aligned(blocks * 4) != blocks * 4:  # padding after the scales
            scales[blocks * 4 :] = 0
        kernel(values, codes, scales[: blocks * 4], self.bits, self.rotated, (header_tensor(header, out.device), out))

    def _decode_payload(
        self, payload: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, out: torch.Tensor | None
    ) -> torch.Tensor:
        count = num_values(shape)
        blocks, size = num_blocks(count), packed_bytes(self.bits)
        codes = payload[: blocks * size]
        scales = payload[blocks * size : blocks * (size + 4)]
        kernel = kernels.decoder(payload, dtype)
        if kernel is not None:
            if out is None:
                out = torch.empty(shape, dtype=dtype, device=payload.device)
            kernel(codes, scales, out, self.bits, self.rotated)
            return out
        rows = dequantize(Affine(unpack(codes.view(blocks, size), self.bits), scales.clone().view(torch.int32)))
        flat = (rotate_back(rows) if self.rotated else rows).view(-1)[:count]
        values = to_dtype(flat, dtype).view(shape)
        return values if out is None else out.copy_(values)

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        rows = padded_rows(values)
        if not rows.numel():
            return torch.zeros_like(values, dtype=torch.float32)
        if self.rotated:
            # At most half a step for each of 64 rotated values; rotation preserves norms: 8 half steps in total.
            rotated = rotate(rows)
            norm = rotated.norm(dim=1, keepdim=True)
            error = 4 * step_bound(rotated, self.bits) + norm * 2.0**-18
        else:
            if values.numel() % BLOCK:  # padding must not widen the last block's range
                rows = rows.clone()
                rows[-1, values.numel() % BLOCK :] = rows[-1, values.numel() % BLOCK - 1]
            error = step_bound(rows, self.bits) / 2 + rows.abs().amax(1, keepdim=True) * 2.0**-20
        return spread(error, values) + rounding_error(values)


@register("hadamard")
class HadamardCodec(BlockCodec):
    """Affine quantization of rotated blocks."""

    rotated = True

    def __init__(self, name: CodecName) -> None:
        super().__init__(name)
        self.summary = f"{self.bits} bits per value, in blocks of 64 rotated to spread outliers"
