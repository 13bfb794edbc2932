"""Ring attention equals attention to all keys: any length, grouped heads, masks and biases, fused or in tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stagewright.engine.context import fused

PRECISE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"lengths": (16, 16), "is_causal": True},
        {"lengths": (23, 23), "is_causal": True, "key_heads": 2, "dtype": "float32"},
        {"lengths": (24, 24), "is_causal": True, "dtype": "bfloat16"},
        {"lengths": (24, 24), "is_causal": True, "key_heads": 2, "autocast": True, "dtype": "bfloat16"},
        {"lengths": (6, 6), "is_causal": True},
        {"lengths": (17, 17), "is_causal": True, "layout": "transposed"},
        {"lengths": (17, 13)},
        {"lengths": (17, 13), "key_heads": 1, "dtype": "float32"},
    ],
)
def test_fused_rings(pool_of: Any, options: dict[str, Any]) -> None:
    check(pool_of(3).run("ring_jobs:errors", **options), options, is_fused=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"lengths": (17, 17), "is_causal": True, "value_size": 5},
        {"lengths": (17, 17), "is_causal": True, "value_size": 5, "tile": 40},
        {"lengths": (17, 13), "is_causal": True},
        {"lengths": (17, 17), "mask": "padding", "is_causal": True, "key_heads": 2},
        {"lengths": (17, 17), "mask": "padding", "dtype": "float32", "tile": 60},
        {"lengths": (17, 13), "mask": "no keys"},
        {"lengths": (17, 13), "mask": "hidden by -1e9", "dtype": "float32"},
        {"lengths": (17, 17), "mask": "hidden by -1e9", "is_causal": True, "tile": 50, "dtype": "float32"},
        {"lengths": (17, 17), "mask": "no keys", "is_causal": True, "tile": 1},
        {"lengths": (17, 13), "mask": "bias"},
        {"lengths": (17, 17), "mask": "bias", "is_causal": True, "tile": 100},
        {"lengths": (9, 13), "mask": "column", "dtype": "float32"},
    ],
)
def test_rings_with_scores(pool_of: Any, options: dict[str, Any]) -> None:
    check(pool_of(3).run("ring_jobs:errors", **options), options, is_fused=False)


def check(results: list[dict[str, Any]], options: dict[str, Any], *, is_fused: bool) -> None:
    """Check the errors of all workers, and that the kernels meant ran."""
    limit = PRECISE[options.get("dtype", "float64")]
    for result in results:
        assert max(result["errors"].values()) <= limit, result
        assert result["is_fused"] == is_fused


def test_what_kernels_of_gpus_are_given() -> None:
    """Without a GPU: torch's own shape functions accept what FlashAttention's forward and backward get."""
    query, key, value = (torch.empty(2, 4, length, 64, dtype=torch.bfloat16, device="meta") for length in (6, 10, 10))
    part = fused.attend(query, key, value, is_causal=False, scale=0.1)
    assert (part.output.shape, part.log_sum.shape) == ((2, 4, 6, 64), (2, 4, 6, 1))
    found = fused.gradients(query, key, value, query, part, is_causal=False, scale=0.1)
    assert [each.shape for each in found] == [query.shape, key.shape, value.shape]
