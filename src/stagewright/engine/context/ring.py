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
    length: int
    """Tokens of the whole sequence."""
    scale: float
    is_causal: bool
    mask: torch.Tensor | None
    """Of the whole sequence: bool, or added to the scores."""
    noise: torch.Tensor | None
    """Dropout of this worker's queries and all keys, scaled."""

    def scores(self, query: torch.Tensor, key: torch.Tensor, source: int) -> torch.Tensor:
        """Return the masked scores of this worker's queries and the keys of a worker."""
        scores = (query @ key.transpose(-2, -1)).float() * self.scale
        rows = self.axis.positions(self.length, device=query.device)
        columns = self.axis.positions(self.length, source, query.device)
        if self.is_causal:
            scores = scores.masked_fill(rows[:, None] < columns, -math.inf)
        if self.mask is not None:
            mask = self.mask.index_select(-2, rows) if self.mask.shape[-2] > 1 else self.mask
            mask = mask.index_select(-1, columns) if mask.shape[-1] > 1 else mask
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        return scores

    def dropped(self, weights: torch.Tensor, source: int) -> torch.Tensor:
        """Apply the dropout of a block."""
        if self.noise is None:
            return weights
        return weights * self.noise.index_select(-1, self.axis.positions(self.length, source, weights.device))

    def source(self, step: int) -> int:
        """Return whose keys this worker has at a step."""
        return (self.axis.index - step) % self.axis.num_workers


def ring_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention: Attention) -> torch.Tensor:
    """Attend from this worker's positions to all; key and value may have fewer heads (grouped queries)."""
    return _Ring.apply(query, key, value, attention)  # type: ignore[no-any-return, no-untyped-call]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        output = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=torch.float32)
        largest = output.new_full((*query.shape[:-1], 1), -math.inf)
        total = torch.zeros_like(largest)
        block = [key, value]
        for step in range(attention.axis.num_workers):
            keys, values = (part.repeat_interleave(groups, 1) for part in block)
            scores = attention.scores(query, keys, attention.source(step))
            maximum = torch.maximum(largest, scores.amax(-1, keepdim=True))
            finite = maximum.masked_fill(maximum == -math.inf, 0.0)
            weights, rescale = (scores - finite).exp(), (largest - finite).exp()
            total = total * rescale + weights.sum(-1, keepdim=True)
            weights = attention.dropped(weights, attention.source(step)).to(values.dtype)
            output = output * rescale + (weights @ values).float()
            largest = maximum
            if step + 1 < attention.axis.num_workers:
                block = attention.axis.shift(block)
        # A query that may attend to nothing has an output and gradients of 0.
        is_empty = total == 0
        output = (output / total.masked_fill(is_empty, 1.0)).to(query.dtype)
        ctx.attention = attention
        ctx.save_for_backward(query, key, value, output, (largest + total.log()).masked_fill(is_empty, math.inf))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        attention: Attention = ctx.attention
        query, key, value, output, log_sum = ctx.saved_tensors
        groups = query.shape[1] // key.shape[1]
        gradient, queries = gradient.float(), query.float()
        delta = (gradient * output.float()).sum(-1, keepdim=True)
        query_gradient = torch.zeros_like(queries)
        block = [key, value, *(torch.zeros_like(part, dtype=torch.float32) for part in (key, value))]
        for step in range(attention.axis.num_workers):
            source = attention.source(step)
            keys, values = (part.repeat_interleave(groups, 1) for part in block[:2])
            weights = (attention.scores(query, keys, source) - log_sum).exp()
            of_values = attention.dropped(weights, source).transpose(-2, -1) @ gradient
            of_weights = attention.dropped(gradient @ values.float().transpose(-2, -1), source)
            of_scores = weights * (of_weights - delta) * attention.scale
            query_gradient += of_scores @ keys.float()
            block[2] = block[2] + _sum_groups(of_scores.transpose(-2, -1) @ queries, groups)
            block[3] = block[3] + _sum_groups(of_values, groups)
            block = attention.axis.shift(block)  # after the last step, each block is back at its worker
        return query_gradient.to(query.dtype), block[2].to(key.dtype), block[3].to(value.dtype), None


def _sum_groups(value: torch.Tensor, groups: int) -> torch.Tensor:
    """Sum over the query heads that share a key."""
    return value.reshape(value.shape[0], -1, groups, *value.shape[2:]).sum(2)
