"""Dropout inside a region of split layers: each worker drops what serial drops in the part that it holds.

    serial       mask of [batch, heads, queries, keys]
    worker 1     draws the same mask whole, and takes its heads of it: the stream of random numbers goes on as serial's

A mask is drawn by the operator that serial uses, for a tensor of the whole shape, so it costs what it costs there.
Attention is computed in plain steps for it: a fused kernel (CUDA's) draws its mask inside, and can't draw a part of
another's. So on CUDA the masks are those of serial without fused kernels, with which the plan is proven equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["SplitDropout"]


class SplitDropout(TorchFunctionMode):
    """While a region is open, ``dropout`` and attention with dropout draw for all workers and keep their part."""

    def __init__(self, *, index: int, num_workers: int, heads: int, features: int) -> None:
        super().__init__()
        self.open = False
        """Between a region's column layers and its row layer."""
        self._index, self._num_workers = index, num_workers
        self._heads, self._features = heads, features  # this worker's; no heads in a feed-forward

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
        dim = self._divided(input.shape)
        if dim is None:
            return self._apart(input.device, lambda: func(input, p, training, inplace))
        noise = self._noise(input, input.shape, dim, p)
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
        def plain() -> Any:
            return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

        if dropout_p == 0:
            return plain()
        if query.dim() != 4 or query.shape[1] != self._heads:
            return self._apart(query.device, plain)
        if enable_gqa:
            key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~allowed, -math.inf)
        elif attn_mask is not None:
            masked = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -math.inf) if masked else scores + attn_mask
        weights = functional.softmax(scores, -1)
        return (weights * self._noise(weights, weights.shape, 1, dropout_p)) @ value

    def _divided(self, shape: torch.Size) -> int | None:
        """The dimension of which this worker has a part; None where that is not certain."""
        if self._heads:
            if len(shape) == 4 and shape[1] == self._heads:
                return 1
            if len(shape) == 4:
                return None
        return len(shape) - 1 if shape[-1] == self._features else None

    def _noise(self, like: torch.Tensor, shape: torch.Size, dim: int, p: float) -> torch.Tensor:
        """0 where serial drops, 1 / (1 - p) where it keeps; this worker's part."""
        whole = list(shape)
        whole[dim] *= self._num_workers
        noise = functional.dropout(torch.ones(whole, dtype=like.dtype, device=like.device), p)
        return noise.narrow(dim, self._index * shape[dim], shape[dim])

    def _apart(self, device: torch.device, call: Callable[[], Any]) -> Any:
        """Run with this worker's own stream of random numbers; the common one goes on by one number."""
        seed = int(torch.randint(2**48, ()))
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed + self._index)
            return call()
