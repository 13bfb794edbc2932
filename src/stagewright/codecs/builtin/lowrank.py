"""lowrank:r: the tensor, reshaped to a matrix, as a product of two thin matrices found by power iteration.

    x [m, n] ≈ P Qᵀ      P [m, r] with orthonormal columns, Q = xᵀ P [n, r]; both are sent in bf16

The tensor is reshaped to the most square matrix. The iteration starts from the same numbers for the same shape, so it
is deterministic on one device; but devices sum products in different orders, so this is the only codec whose bytes
differ between CPU and GPU. A tensor with NaN or Inf decodes as NaN. For a tensor of rank at most r only bf16's error
remains.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stagewright.codecs.base import Codec, num_values, rounding_error
from stagewright.codecs.builtin.block import to_dtype
from stagewright.codecs.name import CodecName
from stagewright.codecs.registry import register

_ITERATIONS = 2


@register("lowrank")
class LowRank(Codec):
    """Low-rank factorization."""

    def __init__(self, name: CodecName) -> None:
        super().__init__(name)
        self.rank = int(name.numbers[0])
        self.summary = f"two factors of rank {self.rank}, in bf16"

    def _sizes(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Return the rows, columns and rank of the matrix."""
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
        for _ in range(_ITERATIONS):
            left = torch.linalg.qr(matrix @ right).Q
            right = matrix.T @ left
        factors = torch.cat((left.reshape(-1), right.reshape(-1) * scale)).to(torch.bfloat16)
        payload[: 2 * factors.numel()] = factors.view(torch.uint8)

    def read(self, payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        rows, columns, rank = self._sizes(shape)
        factors = payload[: 2 * rank * (rows + columns)].clone().view(torch.bfloat16).float()
        left, right = factors[: rows * rank].view(rows, rank), factors[rows * rank :].view(columns, rank)
        flat = left @ right.T
        return to_dtype(flat, dtype).view(tuple(shape))

    def bound(self, values: torch.Tensor) -> torch.Tensor:
        # A projection removes at most the whole norm; bf16 adds 1/128 and float32 sums a little.
        flat = values.detach().float().reshape(-1)
        largest = flat.abs().amax() if flat.numel() else flat.sum()
        norm = (flat / largest).norm() * largest if flat.numel() and float(largest) > 0 else flat.sum() * 0
        return (norm * 1.03 + 2.0**-100).expand(values.shape) + rounding_error(values)
