"""torch's own attention (``nn.MultiheadAttention``) with this worker's heads.

Its code computes with the packed weights of all heads, so its forward is replaced; the output layer is row-parallel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from stagewright.engine.tensor.axis import TensorAxis
from stagewright.errors import UsageError


class ColumnMultiheadAttention(nn.MultiheadAttention):
    """The heads of one worker, as a column-parallel layer; ``num_heads`` is their number."""

    _region: Any

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As in torch; ``is_causal`` says only what ``attn_mask`` is."""
        if need_weights and not average_attn_weights:
            raise UsageError(
                "an nn.MultiheadAttention returns the weights of each head, but each tensor-parallel worker has only "
                "those of its own heads; leave out average_attn_weights=False"
            )
        is_batched = query.dim() == 3
        length_dim = 1 if self.batch_first or not is_batched else 0
        parts = enumerate((query, key, value))
        queries, keys, values = (self._heads(part, index, length_dim) for index, part in parts)
        if not is_batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        mask = self._mask(attn_mask, key_padding_mask, queries)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = queries @ keys.transpose(-2, -1) / math.sqrt(self.head_dim)
            weights = functional.softmax(scores if mask is None else scores + mask, -1)
            weights = functional.dropout(weights, dropout, self.training)
            output = weights @ values
        else:
            output = functional.scaled_dot_product_attention(queries, keys, values, mask, dropout)
        if weights is not None:  # the average over all heads
            axis: TensorAxis = self._region.axis
            weights = axis.reduce_from_region(weights.sum(1) / (self.num_heads * axis.num_workers))
        # Length first in memory, as torch has it: a dropout that follows draws its mask in the order of memory.
        output = self.out_proj(output.permute(2, 0, 1, 3).flatten(2))
        if not is_batched:
            return output.squeeze(1), None if weights is None else weights.squeeze(0)
        return output.transpose(0, 1) if length_dim == 1 else output, weights

    def _heads(self, part: torch.Tensor, index: int, length_dim: int) -> torch.Tensor:
        """Return queries, keys or values as [batch, heads, length, features]."""
        weight = self.in_proj_weight.chunk(3)[index]
        bias = None if self.in_proj_bias is None else self.in_proj_bias.chunk(3)[index]
        features: torch.Tensor = functional.linear(self._region.enter(part), weight, bias)
        if features.dim() == 2:
            features = features.unsqueeze(0)
        elif length_dim == 0:
            features = features.transpose(0, 1)
        return features.view(*features.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _mask(
        self, attention: torch.Tensor | None, padding: torch.Tensor | None, queries: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the sum of both masks as added to the scores; True in a mask of booleans hides a key."""
        added = [added_mask(mask, queries.dtype) for mask in (attention, padding) if mask is not None]
        if not added:
            return None
        if attention is not None and attention.dim() == 3:  # of each sample and head: this worker's heads
            axis: TensorAxis = self._region.axis
            every = added[0].reshape(queries.shape[0], self.num_heads * axis.num_workers, *added[0].shape[1:])
            added[0] = every.chunk(axis.num_workers, 1)[axis.index]
        if padding is not None:
            added[-1] = added[-1][:, None, None, :]
        return added[0] if len(added) == 1 else added[0] + added[1]


def added_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask as added to scores; True in a mask of booleans hides a key."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
