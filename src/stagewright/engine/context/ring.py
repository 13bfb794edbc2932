"""Ring attention: each worker's queries attend to the keys and values of all workers, which travel around a ring.

    step         0        1        2        3            the results of steps are merged by the logarithms of their
    worker 0     kv 0     kv 3     kv 2     kv 1         sums of weights
    worker 1     kv 1     kv 0     kv 3     kv 2

    causal       own keys: a triangle     keys of a worker before: their first chunk, which all queries see
    (zigzag)                              of a worker behind: all keys, which the queries of the last chunk see

The next keys travel while a step computes. Without masks and dropout, steps use torch's fused attention; otherwise the
scores of a tile of queries are held at a time. Backward recomputes the weights from the saved logarithms. Keys and
values go around once more; their gradients follow one step behind, and arrive complete at their own worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from stagewright.engine.context import fused
from stagewright.engine.context.axis import ContextAxis, Shift
from stagewright.engine.context.fused import Part

_TILE_ELEMENTS = 1 << 24
"""Scores that are held at a time without fused kernels."""
_WHOLE = slice(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """What all steps of one attention have in common."""

    axis: ContextAxis
    query_length: int
    """Tokens of the whole sequence that attends."""
    key_length: int
    """Tokens of the whole sequence that is attended to."""
    scale: float
    is_causal: bool
    noise: torch.Tensor | None
    """Dropout of this worker's queries and all keys, scaled."""

    def rows(self, device: torch.device) -> torch.Tensor:
        """Return the positions of this worker's queries."""
        return self.axis.positions(self.query_length, device=device)

    def columns(self, source: int, device: torch.device) -> torch.Tensor:
        """Return the positions of a worker's keys."""
        return self.axis.positions(self.key_length, source, device)

    def source(self, step: int) -> int:
        """Return whose keys this worker has at a step."""
        return (self.axis.index - step) % self.axis.num_workers

    def shift(self, block: list[torch.Tensor], step: int) -> Shift:
        """Pass the keys of a step on, or their gradients, and begin to receive those of the next."""
        return self.axis.shift(block, self.axis.num_positions(self.key_length, self.source(step + 1)))

    def visible(self, source: int) -> tuple[slice, slice, bool]:
        """Return which of this worker's queries see which keys of a worker, and whether only as a triangle."""
        own = self.axis.index
        if not self.is_causal:
            return _WHOLE, _WHOLE, False
        if self.query_length != self.key_length or source == own:
            return _WHOLE, _WHOLE, True
        if source < own:
            return _WHOLE, slice(0, self.axis.num_front(self.key_length, source)), False
        return slice(self.axis.num_front(self.query_length), None), _WHOLE, False


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, attention: Attention
) -> torch.Tensor:
    """Attend from this worker's positions to all; key and value may have fewer heads (grouped queries).

    The mask is that of the whole sequence: bool, or a bias that is added to the scores and may be trained.
    """
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.stride(-1) != 1:  # fused kernels of CPUs would read other memory
        query = query.contiguous()
    return _Ring.apply(query, key, value, mask, attention)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The attention of the queries that see a worker's keys to those keys; heads of keys are repeated."""

    attention: Attention
    source: int
    rows: slice
    """Which of this worker's queries."""
    columns: slice
    """Which of the worker's keys."""
    is_triangle: bool
    """Under a causal mask, whether positions decide which keys a query sees; else it sees all of them."""
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    shift: torch.Tensor | None
    """The largest value of a float mask for each of this worker's queries, over all keys.

    Logarithms of sums around -1e9, with which models hide keys, would have no digits left.
    """

    @classmethod
    def of(
        cls,
        attention: Attention,
        step: int,
        query: torch.Tensor,
        block: list[torch.Tensor],
        mask: torch.Tensor | None,
        shift: torch.Tensor | None,
    ) -> _Step:
        """Return the step with these keys and values."""
        source, groups = attention.source(step), query.shape[1] // block[0].shape[1]
        rows, columns, is_triangle = attention.visible(source)
        key, value = (part[..., columns, :].repeat_interleave(groups, 1) for part in block)
        return cls(
            attention=attention, source=source, rows=rows, columns=columns, is_triangle=is_triangle,
            query=query[..., rows, :], key=key, value=value, mask=mask, shift=shift,
        )  # fmt: skip

    @property
    def is_empty(self) -> bool:
        """Whether no query sees any key."""
        return self.query.shape[-2] == 0 or self.key.shape[-2] == 0

    @property
    def is_fused(self) -> bool:
        """Whether torch has a fused kernel for it."""
        if self.mask is not None or self.attention.noise is not None:
            return False
        if self.is_triangle and self.attention.query_length != self.attention.key_length:
            return False
        return fused.is_fused(self.query, self.key, self.value, is_causal=self.is_triangle)

    def attend(self) -> Part:
        """Return the output of these keys alone."""
        if self.is_fused:
            scale = self.attention.scale
            return fused.attend(self.query, self.key, self.value, is_causal=self.is_triangle, scale=scale)
        parts = [tile.attend_unfused() for tile in self.tiles()]
        return Part(
            output=torch.cat([part.output for part in parts], -2),
            log_sum=torch.cat([part.log_sum for part in parts], -2),
            random=(),
        )

    def gradients(
        self, gradient: torch.Tensor, whole: Part, bias: _BiasGradient | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the contributions to the gradients of queries, keys and values, of repeated heads."""
        gradient, whole = gradient[..., self.rows, :], _narrow(whole, self.rows)
        if self.is_fused:
            return fused.gradients(
                self.query, self.key, self.value, gradient, whole,
                is_causal=self.is_triangle, scale=self.attention.scale,
            )  # fmt: skip
        results = []
        for tile in self.tiles():
            start = tile.rows.start - (self.rows.start or 0)
            own = slice(start, start + tile.query.shape[-2])
            results.append(tile.gradients_unfused(gradient[..., own, :], _narrow(whole, own), bias))
        of_queries, of_keys, of_values = zip(*results, strict=True)
        return torch.cat(of_queries, -2), sum(of_keys[1:], of_keys[0]), sum(of_values[1:], of_values[0])

    def tiles(self) -> Iterator[_Step]:
        """Divide the queries so that only so many scores are held at a time."""
        samples, heads, num_rows, _ = self.query.shape
        size = max(1, _TILE_ELEMENTS // max(1, samples * heads * self.key.shape[-2]))
        first = self.rows.start or 0
        for start in range(0, num_rows, size):
            end = min(start + size, num_rows)
            yield replace(self, rows=slice(first + start, first + end), query=self.query[..., start:end, :])

    def attend_unfused(self) -> Part:
        """Return the output, with all scores."""
        scores = self._scores()
        log_sum = scores.logsumexp(-1, keepdim=True)
        # A query that may attend to no key has an output of 0.
        weights = self._dropped((scores - log_sum.masked_fill(log_sum == -math.inf, 0.0)).exp()).to(self.value.dtype)
        return Part(output=weights @ self.value, log_sum=log_sum, random=())

    def gradients_unfused(
        self, gradient: torch.Tensor, whole: Part, bias: _BiasGradient | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the contributions to gradients, with all scores."""
        wide = whole.log_sum.dtype
        gradient, scale = gradient.to(wide), self.attention.scale
        delta = (gradient * whole.output.to(wide)).sum(-1, keepdim=True)
        weights = (self._scores() - whole.log_sum.masked_fill(whole.log_sum == -math.inf, math.inf)).exp()
        of_values = self._dropped(weights).transpose(-2, -1) @ gradient
        of_weights = self._dropped(gradient @ self.value.to(wide).transpose(-2, -1))
        of_scores = weights * (of_weights - delta)
        if bias is not None:
            bias.add(of_scores, *self._positions())
        of_scores = of_scores * scale
        return of_scores @ self.key.to(wide), of_scores.transpose(-2, -1) @ self.query.to(wide), of_values

    def _positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.query.device
        return self.attention.rows(device)[self.rows], self.attention.columns(self.source, device)[self.columns]

    def _scores(self) -> torch.Tensor:
        """Return the masked scores."""
        scores = self.query @ self.key.transpose(-2, -1)
        scores = scores.to(_wide(scores.dtype)) * self.attention.scale
        rows, columns = self._positions()
        if self.is_triangle:
            scores = scores.masked_fill(rows[:, None] < columns, -math.inf)
        if self.mask is not None:
            mask = self.mask.index_select(-2, rows) if self.mask.shape[-2] > 1 else self.mask
            mask = mask.index_select(-1, columns) if mask.shape[-1] > 1 else mask
            if mask.dtype == torch.bool:
                return scores.masked_fill(~mask, -math.inf)
            scores = scores + mask
            if self.shift is not None:
                scores = scores - (self.shift[..., self.rows, :] if self.shift.shape[-2] > 1 else self.shift)
        return scores

    def _dropped(self, weights: torch.Tensor) -> torch.Tensor:
        """Apply dropout."""
        noise = self.attention.noise
        if noise is None:
            return weights
        return weights * noise[..., self.rows, :].index_select(-1, self._positions()[1])


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        attention: Attention,
    ) -> torch.Tensor:
        block, whole, shift = [key, value], None, _largest_of_rows(mask, attention)
        for index in range(attention.axis.num_workers):
            following = attention.shift(block, index) if index + 1 < attention.axis.num_workers else None
            step = _Step.of(attention, index, query, block, mask, shift)
            if whole is None:  # its own keys, which all its queries see
                whole = _widened(step.attend())
            elif not step.is_empty:
                _merge(_narrow(whole, step.rows), step.attend())
            block = following.wait() if following is not None else block
        assert whole is not None
        output, log_sum = whole.output.to(query.dtype), whole.log_sum
        ctx.attention, ctx.random = attention, whole.random
        ctx.save_for_backward(query, key, value, mask, shift, output, log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        attention: Attention = ctx.attention
        query, key, value, mask, shift, output, log_sum = ctx.saved_tensors
        whole = Part(output=output, log_sum=log_sum, random=ctx.random)
        query_gradient = torch.zeros_like(query, dtype=log_sum.dtype)
        bias_gradient = _BiasGradient(mask) if ctx.needs_input_grad[3] else None
        block, gradients = [key, value], None
        for index in range(attention.axis.num_workers):
            following = attention.shift(block, index) if index + 1 < attention.axis.num_workers else None
            step = _Step.of(attention, index, query, block, mask, shift)
            sums = [torch.zeros_like(part, dtype=log_sum.dtype) for part in block]
            if not step.is_empty:
                of_queries, *others = step.gradients(gradient, whole, bias_gradient)
                query_gradient[..., step.rows, :] += of_queries
                for total, other in zip(sums, others, strict=True):
                    total[..., step.columns, :] += _sum_groups(other, key.shape[1], total.dtype)
            if gradients is not None:
                for total, arrived in zip(sums, gradients.wait(), strict=True):
                    total += arrived
            gradients = attention.shift(sums, index)  # after the last step, they are back at their worker
            block = following.wait() if following is not None else block
        assert gradients is not None
        of_key, of_value = gradients.wait()
        of_bias = None if bias_gradient is None else bias_gradient.total.to(mask.dtype)
        return query_gradient.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), of_bias, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which sums are kept."""
    return torch.promote_types(dtype, torch.float32)


def _largest_of_rows(mask: torch.Tensor | None, attention: Attention) -> torch.Tensor | None:
    """Return the largest value of a float mask for each of this worker's queries; 0 where it hides all keys."""
    if mask is None or mask.dtype == torch.bool:
        return None
    maximum = mask.detach().amax(-1, keepdim=True)
    if maximum.shape[-2] > 1:
        maximum = maximum.index_select(-2, attention.rows(mask.device))
    return maximum.masked_fill(maximum == -math.inf, 0.0)


def _narrow(part: Part, rows: slice) -> Part:
    return replace(part, output=part.output[..., rows, :], log_sum=part.log_sum[..., rows, :])


def _widened(part: Part) -> Part:
    wide = _wide(part.output.dtype)
    return replace(part, output=part.output.to(wide), log_sum=part.log_sum.to(wide))


def _merge(whole: Part, part: Part) -> None:
    """Add the attention to other keys, in place."""
    total = torch.logaddexp(whole.log_sum, part.log_sum.to(whole.log_sum.dtype))
    finite = total.masked_fill(total == -math.inf, 0.0)
    whole.output.mul_((whole.log_sum - finite).exp()).add_(part.output * (part.log_sum - finite).exp())
    whole.log_sum.copy_(total)


class _BiasGradient:
    """The gradient of a bias by this worker's queries, which may be the same for samples or heads."""

    def __init__(self, bias: torch.Tensor) -> None:
        self.total = torch.zeros_like(bias, dtype=_wide(bias.dtype))

    def add(self, of_scores: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
        """Add the gradient of the scores of some queries and keys, at these positions."""
        *others, num_rows, num_columns = self.total.shape
        rows = rows if num_rows > 1 else rows.new_zeros(1)
        columns = columns if num_columns > 1 else columns.new_zeros(1)
        self.total[..., rows[:, None], columns] += of_scores.sum_to_size((*others, len(rows), len(columns)))


def _sum_groups(value: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Sum over the query heads that share a key."""
    return value.reshape(value.shape[0], heads, -1, *value.shape[2:]).sum(2, dtype=dtype)
