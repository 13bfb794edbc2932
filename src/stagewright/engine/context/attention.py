"""What differs inside a block whose sequence is divided: attention, and dropout with the baseline's masks.

The block's code runs unchanged on this worker's positions. ``scaled_dot_product_attention`` becomes ring or all-to-all
attention; masks are those of the whole sequence. Dropout masks are drawn for the whole sequence, as in the baseline, so
the random state advances as there. Attention with dropout is computed without fused kernels, as under tensor
parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from stagewright.engine.context.axis import ContextAxis
from stagewright.engine.context.heads import to_heads, to_positions
from stagewright.engine.context.ring import Attention, ring_attention
from stagewright.errors import UsageError

Exchange: TypeAlias = Literal["ring", "all-to-all"]


class DividedSequence(TorchFunctionMode):
    """The mode of a block while it computes this worker's positions of a sequence."""

    def __init__(self, axis: ContextAxis, exchange: Exchange, block: str) -> None:
        super().__init__()
        self._axis, self._exchange, self._block = axis, exchange, block
        self.length = 0
        """Tokens of the whole sequence."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.dropout:
            return self._dropout(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return self._attention(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not training or p == 0:
            return input
        if input.dim() < 3 or input.shape[1] * self._axis.num_workers != self.length:
            raise UsageError(
                f"context={self._axis.num_workers} can't divide {self._block}: it applies dropout to a tensor of shape "
                f"{list(input.shape)}, whose dimension 1 is not the sequence; set its dropout to 0"
            )
        shape = list(input.shape)
        shape[1] = self.length
        noise = functional.dropout(torch.ones(shape, dtype=input.dtype, device=input.device), p)
        noise = noise.index_select(1, self._axis.positions(self.length, device=input.device))
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
    ) -> torch.Tensor:
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        noise = self._noise(query, dropout_p) if dropout_p > 0 else None
        if self._exchange == "ring":
            if noise is not None:
                noise = noise.index_select(-2, self._axis.positions(self.length, device=query.device))
            attention = Attention(
                axis=self._axis, length=self.length, scale=scale, is_causal=is_causal, mask=attn_mask, noise=noise
            )
            return ring_attention(query, key, value, attention)
        return self._attend_by_heads(func, query, key, value, attn_mask, noise, is_causal, scale)

    def _attend_by_heads(
        self,
        func: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        noise: torch.Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> torch.Tensor:
        axis, heads = self._axis, query.shape[1]
        if heads % axis.num_workers:
            raise UsageError(
                f"context={axis.num_workers} does not divide the {heads} attention heads of {self._block} for "
                'all-to-all attention; use context_attention = "ring"'
            )
        if key.shape[1] % axis.num_workers:  # too few heads of keys to divide: repeat them
            key, value = (part.repeat_interleave(heads // key.shape[1], 1) for part in (key, value))
        query, key, value = (to_heads(part, axis) for part in (query, key, value))
        own = slice(axis.index * heads // axis.num_workers, (axis.index + 1) * heads // axis.num_workers)
        if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
            mask = mask[:, own]
        if noise is None:
            output = func(
                query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=key.shape[1] < query.shape[1]
            )
        else:
            key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
            scores = query @ key.transpose(-2, -1) * scale
            if is_causal:
                allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
                scores = scores.masked_fill(~allowed, -math.inf)
            if mask is not None:
                scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
            output = (functional.softmax(scores, -1) * noise[:, own]) @ value
        return to_positions(output, axis)

    def _noise(self, query: torch.Tensor, rate: float) -> torch.Tensor:
        """Draw the dropout of the whole attention, as the baseline does."""
        shape = (*query.shape[:2], self.length, self.length)
        return functional.dropout(torch.ones(shape, dtype=query.dtype, device=query.device), rate)
