"""lowrank:r: the tensor as a matrix, and that as a product of two thin ones found by power iteration.

    x [m, n] ≈ P Qᵀ      P [m, r] with orthonormal columns, Q = xᵀ P [n, r]; both travel in bf16

The tensor is folded where the matrix becomes most square. The iteration starts from the same numbers for the same
shape, so it is deterministic; but products are added up differently on different devices, so here alone the bytes of a
CPU and a GPU differ. A tensor with a NaN or Inf decodes as NaN. A tensor whose rank is at most r keeps bf16's error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stagewright.codecs.base import Codec, num_values, rounding
from stagewright.codecs.builtin.block import LARGEST
from stagewright.codecs.name import CodecName
from stagewright.codecs.registry import register

__all__ = ["LowRank"]

ROUNDS = 2  # of the power iteration


@register("lowrank")
class LowRank(Codec):
    """Two thin matrices."""

    def __init__(self, name: CodecName) -> None:
        super().__init__(name.text)
        self.rank = int(name.numbers[0])
        self.summary = f"a product of two matrices of rank {self.rank}, in bf16"

    def _sizes(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Rows, columns and rank of the matrix."""
        count = num_values(shape)
        if not count:
            return 0, 0, 0
        rows, best = 1, (1, count)
        for size in shape:
            rows *= size
            if rows + count // rows < sum(best):
                best = (rows, count // rows)
        return *best, min(self.rank, *best)

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        rows, columns, rank = self._sizes(shape)
        return 2 * rank * (rows + columns)

    def write(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        rows, columns, rank = self._sizes(values.shape)
        payload.zero_()
        if not rank:
            return
        matrix = values.float().view(rows, columns)
        largest = matrix.abs().amax()
        if not bool(largest < torch.inf):
            payload[: 2 * rank * (rows + columns)].view(torch.int16).fill_(0x7FC0)
            return
        scale = torch.where(largest > 0, largest, 1.0)
        matrix = matrix / scale
        start = torch.Generator().manual_seed(rows * 1000003 + columns)
        right = torch.randn(columns, rank, generator=start).to(matrix.device)
        for _ in range(ROUNDS):
            left = torch.linalg.qr(matrix @ right).Q
            right = matrix.T @ left
        both = torch.cat((left.reshape(-1), right.reshape(-1) * scale)).to(torch.bfloat16)
        payload[: 2 * both.numel()] = both.view(torch.uint8)

    def read(self, payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        rows, columns, rank = self._sizes(shape)
        both = payload[: 2 * rank * (rows + columns)].clone().view(torch.bfloat16).float()
        left, right = both[: rows * rank].view(rows, rank), both[rows * rank :].view(columns, rank)
        flat = left @ right.T
        if dtype is torch.float16:
            flat = flat.clamp(-LARGEST[dtype], LARGEST[dtype])
        return flat.to(dtype).view(tuple(shape))

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        # A projection takes away no more than there is; bf16 adds a 128th, float32's sums a little.
        length = values.detach().float().reshape(-1)
        most = length.abs().amax() if length.numel() else length.sum()
        norm = (length / most).norm() * most if length.numel() and float(most) > 0 else length.sum() * 0
        return (norm * 1.03 + 2.0**-100).expand(values.shape) + rounding(values)
