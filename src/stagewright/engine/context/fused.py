"""Torch's fused attention of some queries to some keys, with the logarithm of the sums, by which parts are merged.

    CPU     float64, float32, bfloat16, float16
    GPU     bfloat16, float16 (FlashAttention)

Scores are never held. Backward takes output and logarithms of the whole attention, so each part has its own gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.backends import cuda

_aten = torch.ops.aten


def is_fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool) -> bool:
    """Whether a fused kernel takes these; keys and values have as many heads as queries."""
    if query.shape[-1] != value.shape[-1] or len({query.dtype, key.dtype, value.dtype}) > 1:
        return False
    if query.device.type == "cpu":
        return query.is_floating_point()
    size = query.shape[-1]
    if not query.is_cuda or size % 8 or 192 < size <= 224:  # the last have no backward on some GPUs
        return False
    return cuda.can_use_flash_attention(cuda.SDPAParams(query, key, value, None, 0.0, is_causal, False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Attention to some keys."""

    output: torch.Tensor
    log_sum: torch.Tensor
    """For each query, with a last dimension of 1."""
    random: tuple[Any, ...]
    """What else backward's kernel takes, the same for all parts, since they draw no random numbers."""


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool, scale: float) -> Part:
    """Attend to the keys; ``is_causal``: each query to those up to its own index."""
    if query.device.type == "cpu":
        output, log_sum = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, scale=scale
        )
        return Part(output=output, log_sum=log_sum[..., None], random=())
    output, log_sum, starts, key_starts, _, _, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, is_causal, False, scale=scale
    )
    return Part(output=output, log_sum=log_sum[..., None], random=(starts, key_starts, seed, offset))


def gradients(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor, whole: Part, *,
    is_causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return what these keys contribute to the gradients of queries, keys and values.

    ``whole`` has these queries' output and logarithms over all keys.
    """
    log_sum = whole.log_sum.squeeze(-1).contiguous()
    if query.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            gradient, query, key, value, whole.output, log_sum, 0.0, is_causal, scale=scale
        )
    starts, key_starts, seed, offset = whole.random
    return _aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        gradient, query, key, value, whole.output, log_sum, starts, key_starts, query.shape[-2], key.shape[-2], 0.0,
        is_causal, seed, offset, scale=scale,
    )  # fmt: skip
