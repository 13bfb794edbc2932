"""Ring attention: each worker's queries attend to the keys and values of all workers, which travel around a ring.

    step         0        1        2        3            online softmax: a running maximum and sum of each query
    worker 0     kv 0     kv 3     kv 2     kv 1         rescale what earlier blocks have added
    worker 1     kv 1     kv 0     kv 3     kv 2

Backward recomputes the weights of each block from the saved logarithm of the sums. Keys and values go around once more,
together with their gradients, which arrive complete at their own worker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from stagewright.engine.context.axis import ContextAxis


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """What all blocks of one attention have in common."""

    axis: ContextAxis
    query_length: int
    """Tokens of the whole sequence that attends."""
    key_length: int
    """Tokens of the whole sequence that is attended to."""
    scale: float
    is_causal: bool
    noise: torch.Tensor | None
    """Dropout of this worker's queries and all keys, scaled."""

    def scores(self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, source: int) -> torch.Tensor:
        """Return the masked scores of this worker's queries and the keys of a worker."""
        scores = (query @ key.transpose(-2, -1)).float() * self.scale
        rows, columns = self.rows(query.device), self.columns(source, query.device)
        if self.is_causal:
            scores = scores.masked_fill(rows[:, None] < columns, -math.inf)
        if mask is not None:
            mask = mask.index_select(-2, rows) if mask.shape[-2] > 1 else mask
            mask = mask.index_select(-1, columns) if mask.shape[-1] > 1 else mask
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        return scores

    def rows(self, device: torch.device) -> torch.Tensor:
        """Return the positions of this worker's queries."""
        return self.axis.positions(self.query_length, device=device)

    def columns(self, source: int, device: torch.device) -> torch.Tensor:
        """Return the positions of a worker's keys."""
        return self.axis.positions(self.key_length, source, device)

    def shift(self, block: list[torch.Tensor], step: int) -> list[torch.Tensor]:
        """Pass a block of keys on after a step, and receive the next."""
        return self.axis.shift(block, self.axis.num_positions(self.key_length, self.source(step + 1)))

    def dropped(self, weights: torch.Tensor, source: int) -> torch.Tensor:
        """Apply the dropout of a block."""
        if self.noise is None:
            return weights
        return weights * self.noise.index_select(-1, self.columns(source, weights.device))

    def source(self, step: int) -> int:
        """Return whose keys this worker has at a step."""
        return (self.axis.index - step) % self.axis.num_workers


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, attention: Attention
) -> torch.Tensor:
    """Attend from this worker's positions to all; key and value may have fewer heads (grouped queries).

    The mask is that of the whole sequence: bool, or a bias that is added to the scores and may be trained.
    """
    return _Ring.apply(query, key, value, mask, attention)  # type: ignore[no-any-return, no-untyped-call]


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
        groups = query.shape[1] // key.shape[1]
        output = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=torch.float32)
        largest = output.new_full((*query.shape[:-1], 1), -math.inf)
        total = torch.zeros_like(largest)
        block = [key, value]
        for step in range(attention.axis.num_workers):
            keys, values = (part.repeat_interleave(groups, 1) for part in block)
            scores = attention.scores(query, keys, mask, attention.source(step))
            maximum = torch.maximum(largest, scores.amax(-1, keepdim=True))
            finite = maximum.masked_fill(maximum == -math.inf, 0.0)
            weights, rescale = (scores - finite).exp(), (largest - finite).exp()
            total = total * rescale + weights.sum(-1, keepdim=True)
            weights = attention.dropped(weights, attention.source(step)).to(values.dtype)
            output = output * rescale + (weights @ values).float()
            largest = maximum
            if step + 1 < attention.axis.num_workers:
                block = attention.shift(block, step)
        # A query that may attend to nothing has an output and gradients of 0.
        is_empty = total == 0
        output = (output / total.masked_fill(is_empty, 1.0)).to(query.dtype)
        ctx.attention = attention
        ctx.save_for_backward(query, key, value, mask, output, (largest + total.log()).masked_fill(is_empty, math.inf))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        attention: Attention = ctx.attention
        query, key, value, mask, output, log_sum = ctx.saved_tensors
        groups = query.shape[1] // key.shape[1]
        gradient, queries = gradient.float(), query.float()
        delta = (gradient * output.float()).sum(-1, keepdim=True)
        query_gradient = torch.zeros_like(queries)
        bias_gradient = _BiasGradient(mask, attention) if ctx.needs_input_grad[3] else None
        block = [key, value, *(torch.zeros_like(part, dtype=torch.float32) for part in (key, value))]
        for step in range(attention.axis.num_workers):
            source = attention.source(step)
            keys, values = (part.repeat_interleave(groups, 1) for part in block[:2])
            weights = (attention.scores(query, keys, mask, source) - log_sum).exp()
            of_values = attention.dropped(weights, source).transpose(-2, -1) @ gradient
            of_weights = attention.dropped(gradient @ values.float().transpose(-2, -1), source)
            of_scores = weights * (of_weights - delta)
            if bias_gradient is not None:
                bias_gradient.add(of_scores, source)
            of_scores = of_scores * attention.scale
            query_gradient += of_scores @ keys.float()
            block[2] = block[2] + _sum_groups(of_scores.transpose(-2, -1) @ queries, groups)
            block[3] = block[3] + _sum_groups(of_values, groups)
            block = attention.shift(block, step)  # after the last step, each block is back at its worker
        of_bias = None if bias_gradient is None else bias_gradient.whole()
        return query_gradient.to(query.dtype), block[2].to(key.dtype), block[3].to(value.dtype), of_bias, None


class _BiasGradient:
    """The gradient of a bias by this worker's queries, which may be the same for samples or heads."""

    def __init__(self, bias: torch.Tensor, attention: Attention) -> None:
        self._bias, self._attention = bias, attention
        self._rows = attention.rows(bias.device) if bias.shape[-2] > 1 else None
        shape = [*bias.shape]
        shape[-2] = 1 if self._rows is None else len(self._rows)
        self._total = torch.zeros(shape, device=bias.device)

    def add(self, of_scores: torch.Tensor, source: int) -> None:
        """Add the gradient of the scores of a worker's keys."""
        if self._total.shape[-1] == 1:
            self._total += of_scores.sum_to_size(self._total.shape)
            return
        columns = self._attention.columns(source, of_scores.device)
        self._total.index_add_(-1, columns, of_scores.sum_to_size((*self._total.shape[:-1], len(columns))))

    def whole(self) -> torch.Tensor:
        """Return the gradient of the whole bias, with 0 for the queries of others."""
        total = self._total.to(self._bias.dtype)
        return total if self._rows is None else torch.zeros_like(self._bias).index_copy_(-2, self._rows, total)


def _sum_groups(value: torch.Tensor, groups: int) -> torch.Tensor:
    """Sum over the query heads that share a key."""
    return value.reshape(value.shape[0], -1, groups, *value.shape[2:]).sum(2)
