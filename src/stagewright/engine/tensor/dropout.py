"""Dropout inside a tensor-parallel region: each worker applies its shard of the single-device baseline's mask.

    baseline     mask of [batch, heads, queries, keys]
    worker 1     draws the same full mask and uses its heads of it; the random state advances as in the baseline

The mask is drawn for the full shape with the same random numbers as in the baseline, so it costs as much as there.
Attention with dropout is computed without fused kernels: a fused CUDA kernel draws its mask internally and can't draw
one worker's shard of it. On CUDA the parity check therefore compares with a baseline that has no fused attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class ShardedDropout(TorchFunctionMode):
    """Dropout and attention dropout that draw the full mask and apply one worker's shard while a region is open."""

    def __init__(self, *, index: int, num_workers: int, heads: int, features: int) -> None:
        """``heads`` and ``features`` are those of this worker; 0 heads in a feed-forward region."""
        super().__init__()
        self.open = False
        """True between a region's column-parallel layers and its row-parallel layer."""
        self._index, self._num_workers = index, num_workers
        self._heads, self._features = heads, features

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.open and func is functional.dropout:
            return self._dropout(func, *args, **kwargs)
        if self.open and func is functional.scaled_dot_product_attention:
            return self._attention(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self, func: Any, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        if not training or p == 0:
            return input
        dim = self._sharded_dim(input.shape)
        if dim is None:
            return self._with_worker_seed(input.device, lambda: func(input, p, training, inplace))
        noise = self._noise(input, dim, p)
        return input.mul_(noise) if inplace else input * noise

    def _attention(
        self,
        func: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        def run_unchanged() -> Any:
            return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

        if dropout_p == 0:
            return run_unchanged()
        if query.dim() != 4 or query.shape[1] != self._heads:
            return self._with_worker_seed(query.device, run_unchanged)
        if enable_gqa:
            key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~allowed, -math.inf)
        elif attn_mask is not None:
            is_bool = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -math.inf) if is_bool else scores + attn_mask
        weights = functional.softmax(scores, -1)
        return (weights * self._noise(weights, 1, dropout_p)) @ value

    def _sharded_dim(self, shape: torch.Size) -> int | None:
        """Return the dimension that is sharded; None if that is uncertain."""
        if self._heads and len(shape) == 4:
            return 1 if shape[1] == self._heads else None
        return len(shape) - 1 if shape[-1] == self._features else None

    def _noise(self, like: torch.Tensor, dim: int, p: float) -> torch.Tensor:
        """Return this worker's shard of the scaled mask: 0 where the baseline drops, 1 / (1 - p) elsewhere."""
        full_shape = list(like.shape)
        full_shape[dim] *= self._num_workers
        start, length = self._index * like.shape[dim], like.shape[dim]
        return draw_noise(full_shape, p, like, lambda noise: noise.narrow(dim, start, length))

    def _with_worker_seed(self, device: torch.device, call: Callable[[], Any]) -> Any:
        """Run ``call`` with a random state of this worker; the shared state advances by one draw."""
        seed = int(torch.randint(2**48, ()))
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed + self._index)
            return call()


def draw_noise(
    shape: Sequence[int], p: float, like: torch.Tensor, own: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return ``own`` of what dropout multiplies a tensor of ``shape`` by, drawn as dropout draws it.

    On a CPU the random numbers do not depend on the dtype of the mask, so that only this worker's part becomes floats.
    """
    if like.device.type != "cpu" or p == 1 or torch.compiler.is_compiling():
        return own(functional.dropout(torch.ones(shape, dtype=like.dtype, device=like.device), p))
    kept = own(torch.empty(shape, dtype=torch.bool).bernoulli_(1 - p))
    return kept.to(like.dtype).mul_(torch.ones((), dtype=like.dtype).div_(1 - p))
