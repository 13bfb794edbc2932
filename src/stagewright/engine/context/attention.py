"""What differs inside a block whose sequence is divided: attention, and dropout with the baseline's masks.

The block's code runs unchanged on this worker's positions. ``scaled_dot_product_attention`` becomes ring or all-to-all
attention, also in ``nn.MultiheadAttention``; masks are those of the whole sequence. Dropout masks are drawn for the
whole sequence, as in the baseline, so the random state advances as there. Attention with dropout is computed without
fused kernels, as under tensor parallelism. torch does not use its fused transformer layer under this mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, Literal, TypeAlias

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from stagewright.engine.context.axis import ContextAxis, laid_out_like
from stagewright.engine.context.heads import to_heads, to_positions
from stagewright.engine.context.multihead import MultiheadCall
from stagewright.engine.context.ring import Attention, ring_attention
from stagewright.engine.context.sources import Sources, whole_sizes
from stagewright.errors import UsageError

Exchange: TypeAlias = Literal["ring", "all-to-all"]


class DividedSequence(TorchFunctionMode):
    """The mode of a block while it computes this worker's positions of a sequence."""

    def __init__(self, axis: ContextAxis, exchange: Exchange, block: str, sources: Sources) -> None:
        super().__init__()
        self._axis, self._exchange, self._block, self._sources = axis, exchange, block, sources
        self.length = 0
        """Tokens of the whole sequence."""
        self.key_lengths: tuple[int, ...] = ()
        """Tokens that each attention call attends to, in order."""
        self._num_calls = 0

    def begin(self, length: int, key_lengths: tuple[int, ...]) -> None:
        """Begin a call of the block, whose sequences have these lengths."""
        self.length, self.key_lengths, self._num_calls = length, key_lengths, 0

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.dropout:
            return self._dropout(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            return self._multihead(MultiheadCall.of(args, kwargs)), None
        if self._sources.makes_masks and self._num_calls < len(self.key_lengths):
            whole = (self.length, self.key_lengths[self._num_calls])
            here = (self._axis.num_positions(whole[0]), self._axis.num_positions(whole[1]))
            args, kwargs = whole_sizes(func, args, kwargs, here, whole)
        return func(*args, **kwargs)

    def _dropout(self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not training or p == 0:
            return input
        dim = self._sources.sequence_dim
        if input.dim() < 3 or input.shape[dim] != self._axis.num_positions(self.length):
            raise UsageError(
                f"context={self._axis.num_workers} can't divide {self._block}: it applies dropout to a tensor of shape "
                f"{list(input.shape)}, whose dimension {dim} is not the sequence; set its dropout to 0"
            )
        shape = list(input.shape)
        shape[dim] = self.length
        noise = functional.dropout(laid_out_like(input, torch.ones(shape, dtype=input.dtype, device=input.device)), p)
        noise = self._axis.part(noise, dim)
        return input.mul_(noise) if inplace else input * noise

    def _multihead(self, call: MultiheadCall) -> torch.Tensor:
        whole, masks = (self.length, self._next_key_length()), call.masks()
        for mask in masks:
            self._check_mask(mask, whole)
        merged = reduce(torch.add, masks) if masks else None
        query, key, value = call.heads()
        return call.output(self._attention(query, key, value, merged, call.dropout, call.is_causal))

    def _attention(
        self,
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
        attention = Attention(
            axis=self._axis,
            query_length=self.length,
            key_length=self._next_key_length(),
            scale=1 / math.sqrt(query.shape[-1]) if scale is None else scale,
            is_causal=is_causal,
            noise=None,
        )
        self._num_calls += 1
        self._check_mask(attn_mask, (attention.query_length, attention.key_length))
        if dropout_p > 0:
            attention = replace(attention, noise=self._noise(query, attention, dropout_p))
        if self._exchange == "ring":
            return ring_attention(query, key, value, attn_mask, attention)
        return self._attend_by_heads(query, key, value, attn_mask, attention)

    def _next_key_length(self) -> int:
        """Return the tokens of the whole sequence that the next call attends to."""
        if self._num_calls == len(self.key_lengths):
            raise UsageError(
                f"context={self._axis.num_workers} can't divide {self._block}: it calls attention more than "
                f"{self._num_calls} times, as with the example; use data or pipeline parallelism instead"
            )
        return self.key_lengths[self._num_calls]

    def _check_mask(self, mask: torch.Tensor | None, whole: tuple[int, int]) -> None:
        """Refuse a mask that is not that of the whole sequences."""
        if mask is None or (
            mask.dim() > 1 and all(size in (1, length) for size, length in zip(mask.shape[-2:], whole, strict=True))
        ):
            return
        raise UsageError(
            f"context={self._axis.num_workers} can't divide {self._block}: it makes an attention mask of shape "
            f"{list(mask.shape)} for {whole[0]} queries and {whole[1]} keys; use data or pipeline parallelism instead"
        )

    def _attend_by_heads(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        attention: Attention,
    ) -> torch.Tensor:
        axis, heads = self._axis, query.shape[1]
        if heads % axis.num_workers:
            raise UsageError(
                f"context={axis.num_workers} does not divide the {heads} attention heads of {self._block} for "
                'all-to-all attention; use context_attention = "ring"'
            )
        if key.shape[1] % axis.num_workers:  # too few heads of keys to divide: repeat them
            key, value = (part.repeat_interleave(heads // key.shape[1], 1) for part in (key, value))
        query = to_heads(query, axis, attention.query_length)
        key, value = (to_heads(part, axis, attention.key_length) for part in (key, value))
        own = slice(axis.index * heads // axis.num_workers, (axis.index + 1) * heads // axis.num_workers)
        if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
            mask = mask[:, own]
        if attention.noise is None:
            is_grouped = key.shape[1] < query.shape[1]
            output = functional.scaled_dot_product_attention(
                query, key, value, mask, 0.0, attention.is_causal, scale=attention.scale, enable_gqa=is_grouped
            )
        else:
            key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
            scores = query @ key.transpose(-2, -1) * attention.scale
            if attention.is_causal:
                allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
                scores = scores.masked_fill(~allowed, -math.inf)
            if mask is not None:
                scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
            output = (functional.softmax(scores, -1) * attention.noise[:, own]) @ value
        return to_positions(output, axis)

    def _noise(self, query: torch.Tensor, attention: Attention, rate: float) -> torch.Tensor:
        """Draw the dropout of the whole attention, as the baseline does; a ring needs that of this worker's queries."""
        shape = (*query.shape[:2], attention.query_length, attention.key_length)
        noise = functional.dropout(torch.ones(shape, dtype=query.dtype, device=query.device), rate)
        return noise.index_select(-2, attention.rows(query.device)) if self._exchange == "ring" else noise
