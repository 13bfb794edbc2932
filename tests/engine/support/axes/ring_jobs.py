"""Worker functions for tests of ring attention, run by ``pool``: each ring is compared with attention to all keys."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional

from stagewright.engine.context import fused, ring
from stagewright.engine.context.axis import ContextAxis

SAMPLES, HEADS, SIZE = 2, 4, 6


def errors(
    rank: int,
    *,
    lengths: tuple[int, int],
    is_causal: bool = False,
    key_heads: int = HEADS,
    value_size: int = SIZE,
    mask: str = "",
    dtype: str = "float64",
    tile: int = 0,
    autocast: bool = False,
    layout: str = "",
) -> dict[str, Any]:
    """Return the largest relative errors of this worker's output and gradients, and whether fused kernels ran."""
    data_type, axis = getattr(torch, dtype), ContextAxis(dist.group.WORLD)
    torch.manual_seed(0)
    query, key, value, gradient = (
        torch.randn(SAMPLES, heads, length, size, dtype=torch.float64)
        for heads, length, size in (
            (HEADS, lengths[0], SIZE),
            (key_heads, lengths[1], SIZE),
            (key_heads, lengths[1], value_size),
            (HEADS, lengths[0], value_size),
        )
    )
    bias = _mask(mask, lengths)
    # A large number absorbs scores, as far as the type goes.
    exact = data_type if "1e9" in mask else torch.float64
    wanted = [tensor.to(data_type).to(exact).clone().requires_grad_() for tensor in (query, key, value)]
    wanted += [bias.clone().requires_grad_()] if mask == "bias" else []
    expected = _attend(*wanted[:3], wanted[3] if mask == "bias" else bias, is_causal)
    expected.backward(gradient.to(data_type).to(exact))

    rows = axis.positions(lengths[0])
    places = [rows, axis.positions(lengths[1]), axis.positions(lengths[1])]
    own = [
        tensor.to(torch.float32 if autocast else data_type).index_select(2, place).requires_grad_()
        for tensor, place in zip((query, key, value), places, strict=True)
    ]
    if layout == "transposed":
        own[0] = own[0].detach().mT.contiguous().mT.requires_grad_()
    if bias is not None and bias.dtype != torch.bool:
        bias = bias.to(data_type).requires_grad_(mask == "bias")
    attention = ring.Attention(
        axis=axis, query_length=lengths[0], key_length=lengths[1], scale=1 / math.sqrt(SIZE), is_causal=is_causal,
        noise=None,
    )  # fmt: skip
    with (
        mock.patch.object(ring, "_TILE_ELEMENTS", tile or ring._TILE_ELEMENTS),
        mock.patch.object(fused, "attend", wraps=fused.attend) as attend,
    ):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            output = ring.ring_attention(*own, bias, attention)
        output.backward(gradient.to(output.dtype).index_select(2, rows))
    found = {"output": (output, expected.index_select(2, rows))}
    for name, tensor, whole, place in zip(["query", "key", "value"], own, wanted, places, strict=False):
        found[name] = (tensor.grad, whole.grad.index_select(2, place))  # type: ignore[union-attr]
    if mask == "bias":
        total = bias.grad.double()  # type: ignore[union-attr]
        dist.all_reduce(total)
        found["bias"] = (total, wanted[3].grad)
    assert output.dtype == (torch.bfloat16 if autocast else data_type)
    return {"errors": {name: _error(*pair) for name, pair in found.items()}, "is_fused": attend.called}


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
) -> torch.Tensor:
    """Attend with all scores; a query that may attend to nothing has an output of 0."""
    key, value = (part.repeat_interleave(HEADS // part.shape[1], 1) for part in (key, value))
    scores = query @ key.transpose(-2, -1) / math.sqrt(SIZE)
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(scores)
    is_empty = (scores == -math.inf).all(-1, keepdim=True)
    return functional.softmax(scores.masked_fill(is_empty, 0.0), -1).masked_fill(is_empty, 0.0) @ value


def _mask(kind: str, lengths: tuple[int, int]) -> torch.Tensor | None:
    if kind == "padding":
        return torch.arange(lengths[1]) < torch.tensor([[[[lengths[1] - 2]]], [[[2]]]])
    if kind == "no keys":  # the first queries may attend to nothing
        return torch.ones(*lengths, dtype=torch.bool).tril(-2)
    if kind == "hidden by -1e9":  # so are all keys of the first queries
        return torch.ones(*lengths, dtype=torch.float64).tril(-2).sub(1).mul(1e9)
    if kind in ("bias", "column"):
        shape = (1, HEADS, *lengths) if kind == "bias" else (1, 1, 1, lengths[1])
        return torch.randn(shape, dtype=torch.float64)
    return None


def _error(found: torch.Tensor | None, wanted: torch.Tensor) -> float:
    assert found is not None
    return float((found.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-3))
