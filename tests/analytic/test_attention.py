"""Attention of context parallel ranks: bytes and time of rings and all-to-alls, which is faster, and the engine's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stagewright.analytic.attention import Attention, context_attentions
from stagewright.analytic.forecast import AnalyticForecast, forecast_layout, forecast_plan, kernels_for
from stagewright.analytic.hardware.collectives import Network
from stagewright.analytic.hardware.devices import find_accelerator
from stagewright.analytic.hardware.named_cluster import named_cluster
from stagewright.analytic.layout import Layout
from stagewright.analytic.models import load_shape
from stagewright.analytic.shape import TransformerShape
from stagewright.engine.context import fused, ring
from stagewright.errors import UsageError
from stagewright.profiler.allocations import AllocationCounter
from stagewright.profiler.storage import tensors_in
from stagewright.report.tables.analytic import analytic_summary
from stagewright.spec.plan import Mesh, ModelSpec, Plan

# 8 heads of 64, 2 of keys: a token has 512 elements of queries, as many of output, 128 of keys and of values.
SHAPE = TransformerShape(
    num_layers=4, width=512, num_heads=8, num_key_heads=2, feed_forward=2048, num_matrices=3, vocabulary=1000,
    sequence_length=4096, tied=True, rotary=True,
)  # fmt: skip
LAYOUT = Layout(context=4, microbatch=2, context_attention="ring")
TOKENS = 2 * 4096 // 4
KEYS = TOKENS * (128 + 128) * 2
"""Bytes of the keys and values of a rank."""
# 1 GB/s, nothing else.
SLOW = Network(
    devices_per_host=8, intra_bytes_per_s=1e9, intra_latency_s=0.0, inter_bytes_per_s=1e9, inter_latency_s=0.0,
    intra_share=1.0, overhead_s=0.0,
)  # fmt: skip


def attention(layout: Layout = LAYOUT, shape: TransformerShape = SHAPE) -> Attention:
    device = find_accelerator("H100")
    assert device is not None
    return Attention(shape=shape, layout=layout, kernels=kernels_for(device, layout.precision, True))


def test_bytes_of_a_ring() -> None:
    """Keys and values of a share, in backward with their gradients; queries and output stay."""
    assert attention().sent_bytes(backward=False) == KEYS
    assert attention().sent_bytes(backward=True) == 2 * KEYS
    engine = attention(replace(LAYOUT, stack="stagewright"))
    assert engine.sent_bytes(backward=True) == 3 * KEYS, "gradients in 32 bits"
    assert attention(replace(LAYOUT, tensor=2)).sent_bytes(backward=False) == KEYS // 2
    assert attention(shape=replace(SHAPE, num_key_heads=8)).sent_bytes(backward=False) == 4 * KEYS


def test_time_of_a_ring() -> None:
    """Three sends of a share, each behind the attention to one of four shares."""
    (operator,) = attention().operators()
    for backward, compute_s in ((False, operator.forward_s), (True, operator.backward_s)):
        send_s = (1 + backward) * KEYS / 1e9
        assert send_s > compute_s / 4
        seconds, count = attention().exchange(SLOW, backward=backward)
        assert (seconds, count) == (pytest.approx(3 * (send_s - compute_s / 4)), 3)
        fast = replace(SLOW, intra_bytes_per_s=1e12)
        assert attention().exchange(fast, backward=backward) == (0.0, 3), "hidden"


def test_a_ring_is_as_fast_as_its_slowest_link() -> None:
    network = replace(SLOW, devices_per_host=2, intra_bytes_per_s=1e12)
    inside, across = network.group(2, 1), network.group(4, 1)
    assert network.ring_step_s(inside, 1e9) == pytest.approx(1e-3)
    assert network.ring_step_s(across, 1e9) == pytest.approx(1 / 0.8)


def test_time_of_the_engines_ring() -> None:
    """Backward's gradients follow one step behind; the last are waited for, and hidden states where a block ends."""
    engine = attention(replace(LAYOUT, stack="stagewright"))
    (operator,) = engine.operators()
    gather_s = 0.75 * 4 * TOKENS * 512 * 2 / 1e9
    for backward, sent_s in ((False, KEYS / 1e9), (True, 3 * KEYS / 1e9)):
        seconds, count = engine.exchange(SLOW, backward=backward)
        share_s = engine.stack.kernel_factor * (operator.backward_s if backward else operator.forward_s) / 4
        last_s = 2 * KEYS / 1e9 if backward else 0.0
        assert sent_s > share_s
        assert seconds == pytest.approx(3 * (sent_s - share_s) + last_s + gather_s)
        assert count == (8 if backward else 4)


def test_time_of_all_to_alls() -> None:
    """Queries, keys, values and output, of which a quarter stays."""
    layout = replace(LAYOUT, context=2, context_attention="all-to-all")
    num_bytes = 2 * TOKENS * (512 + 512 + 128 + 128) * 2
    for backward in (False, True):
        seconds, count = attention(layout).exchange(SLOW, backward=backward)
        assert (seconds, count) == (pytest.approx(num_bytes / 2 / 1e9), 4)
    repeated = attention(replace(layout, context=4, stack="stagewright"))
    assert repeated.key_elements == TOKENS * (512 + 512), "4 workers do not divide 2 heads of keys: they are repeated"
    assert attention(replace(LAYOUT, context=1)).exchange(SLOW, backward=False) == (0.0, 0)


def test_memory_of_a_ring() -> None:
    """The share that is used and the one that arrives, with gradients; scores of a tile without fused kernels."""
    assert attention().temporary_bytes == 2 * 2 * KEYS
    layout, repeated = replace(LAYOUT, stack="stagewright"), TOKENS * (512 + 512) * 2
    assert attention(layout).temporary_bytes == 2 * KEYS + 2 * repeated + 4 * 2 * KEYS + 4 * TOKENS * 512
    unfused = attention(layout, replace(SHAPE, dropout=True))
    assert unfused.temporary_bytes == 2 * 3 * KEYS + 16 * 2 * 8 * 1024**2
    longer = attention(layout, replace(SHAPE, dropout=True, sequence_length=1 << 17))
    assert longer.temporary_bytes == 2 * 3 * 32 * KEYS + 16 * ring._TILE_ELEMENTS
    assert attention(replace(LAYOUT, context=2, context_attention="all-to-all")).temporary_bytes == 0
    one, other = (
        forecast_layout(SHAPE, replace(LAYOUT, context=2, context_attention=kind), named_cluster("8xh100")).memory[0]
        for kind in ("ring", "all-to-all")
    )
    assert one.temporary_bytes - other.temporary_bytes == 2 * 2 * 2 * KEYS


def forecast(text: str, model: str, cluster: str, length: int) -> AnalyticForecast:
    return forecast_layout(load_shape(model, length), Layout.parse(text), named_cluster(cluster))


@pytest.mark.parametrize(
    ("text", "model", "cluster", "length", "faster"),
    [
        # Between hosts a ring of 8 heads of keys hides behind attention; all-to-alls send 32 heads of queries too.
        ("cp=8,dp=4,zero=1,order=dp-tp-cp-pp", "llama-3-8b", "4x8xh100", 131072, "ring"),
        # With 32 heads of keys a ring sends more than fits behind attention.
        ("cp=8,dp=4,zero=1,order=dp-tp-cp-pp", "llama-2-7b", "4x8xh100", 8192, "all-to-all"),
        # Inside a host all-to-alls are short, and attention over the whole sequence is one large kernel.
        ("cp=8", "llama-3-8b", "8xh100", 4096, "all-to-all"),
        # The engine's ring repeats heads of keys, and sends gradients in 32 bits.
        ("cp=8,dp=4,stack=stagewright,order=dp-tp-cp-pp", "llama-3-8b", "4x8xh100", 131072, "all-to-all"),
    ],
)
def test_the_faster_attention(text: str, model: str, cluster: str, length: int, faster: str) -> None:
    found = forecast(text, model, cluster, length)
    other = {"ring": "all-to-all", "all-to-all": "ring"}[faster]
    stated = forecast(f"{text},context_attention={faster}", model, cluster, length)
    slower = forecast(f"{text},context_attention={other}", model, cluster, length)
    assert (found.context_attention, slower.context_attention) == (faster, other)
    assert found == stated
    assert found.step_s < slower.step_s
    assert f"attention of context parallel ranks: {faster}" in analytic_summary(found)


def test_the_attention_that_fits() -> None:
    """Where the faster ring does not fit, all-to-alls are used."""
    shape, cluster = load_shape("llama-3-8b", 131072), named_cluster("4x8xh100")
    layout = Layout.parse("cp=8,dp=4,zero=1,order=dp-tp-cp-pp")
    peaks = [
        forecast_layout(shape, replace(layout, context_attention=kind), cluster).peak_memory_bytes
        for kind in context_attentions(shape, layout)
    ]
    assert peaks[0] > peaks[1]
    for limit, kind in ((peaks[0], "ring"), (peaks[1], "all-to-all"), (1, "ring")):
        devices = tuple(replace(group, memory_bytes=limit) for group in cluster.devices)
        found = forecast_layout(shape, layout, replace(cluster, devices=devices))
        assert (found.context_attention, found.fits) == (kind, limit > 1)


def test_heads_that_all_to_alls_can_not_divide() -> None:
    assert context_attentions(SHAPE, replace(LAYOUT, context=2)) == ("ring", "all-to-all")
    assert context_attentions(SHAPE, LAYOUT) == ("ring",), "4 ranks, 2 heads of keys"
    assert context_attentions(SHAPE, replace(LAYOUT, stack="stagewright")) == ("ring", "all-to-all"), "repeated"
    assert context_attentions(SHAPE, replace(LAYOUT, context=16, stack="stagewright")) == ("ring",)
    cluster = named_cluster("2x8xh100")
    words = "4 context parallel ranks do not divide the 8 attention heads and 2 key heads .* use context_attention=ring"
    with pytest.raises(UsageError, match=words):
        forecast_layout(SHAPE, replace(LAYOUT, context_attention="all-to-all"), cluster)
    assert forecast_layout(SHAPE, replace(LAYOUT, context_attention=None), cluster).context_attention == "ring"
    assert forecast_layout(SHAPE, Layout(), cluster).context_attention is None


def test_a_plan_has_the_attention_that_it_states() -> None:
    plan = Plan(model=ModelSpec(name="hf:x"), batch=4, mesh=Mesh(context=2, data=2), precision="bf16")
    cluster = named_cluster("4xh100")
    one, other = (
        forecast_plan(replace(plan, context_attention=kind), SHAPE, cluster, innermost=innermost)  # type: ignore[arg-type]
        for kind, innermost in (("ring", "pipeline"), ("all-to-all", "data"))
    )
    assert (one.context_attention, other.context_attention) == ("ring", "all-to-all")


class _Axis:
    """A context axis without workers, which counts the bytes of each send."""

    index = 0

    def __init__(self, num_workers: int, length: int) -> None:
        self.num_workers, self._size = num_workers, length // num_workers
        self.sends: list[int] = []

    def positions(self, length: int, worker: int | None = None, device: Any = None) -> torch.Tensor:
        return torch.arange(self._size) + self._size * (worker or 0)

    def num_positions(self, length: int, worker: int | None = None) -> int:
        return self._size

    def num_front(self, length: int, worker: int | None = None) -> int:
        return self._size // 2

    def shift(self, values: Sequence[torch.Tensor], size: int) -> SimpleNamespace:
        self.sends.append(sum(value.nbytes for value in values))
        received = [value.clone() for value in values]
        return SimpleNamespace(wait=lambda: received)


class _Traffic(TorchDispatchMode):
    """Bytes that kernels other than products read and write of tensors of at least so many elements."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.num_bytes = self.num_kernels = self.num_products = 0
        self._least = least

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs, outputs = [*tensors_in((args, kwargs))], [*tensors_in(result)]
        storages = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        is_view = all(tensor.untyped_storage().data_ptr() in storages for tensor in outputs)
        if is_view and not function._schema.is_mutable:
            return result
        if "mm" in function.__name__:
            self.num_products += 1
        else:
            self.num_bytes += sum(each.nbytes for each in (*inputs, *outputs) if each.numel() >= self._least)
        self.num_kernels += 1
        return result


def _passes(axis: _Axis, layout: Layout, shape: TransformerShape, counters: Sequence[Any]) -> Iterator[tuple[Any, int]]:
    """Run forward and backward of the engine's ring, each inside a counter; yield it and the number of sends."""
    rows, data_type = shape.sequence_length // layout.context, getattr(torch, layout.precision)
    query, key, value = (
        torch.randn(layout.microbatch, heads, rows, shape.head_size, dtype=data_type, requires_grad=True)
        for heads in (shape.num_heads, shape.num_key_heads, shape.num_key_heads)
    )
    call = ring.Attention(
        axis=axis,  # type: ignore[arg-type]
        query_length=shape.sequence_length, key_length=shape.sequence_length, scale=1.0, is_causal=True, noise=None,
    )  # fmt: skip
    with counters[0]:
        output = ring.ring_attention(query, key, value, None, call)
    yield counters[0], len(axis.sends)
    gradient = torch.ones_like(output)
    with counters[1]:
        output.backward(gradient)
    yield counters[1], len(axis.sends)


@pytest.mark.parametrize(("precision", "is_fused"), [("bfloat16", True), ("bfloat16", False), ("float32", False)])
@pytest.mark.parametrize("num_workers", [2, 3])
def test_the_engines_ring_is_counted(
    monkeypatch: pytest.MonkeyPatch, precision: Any, num_workers: int, is_fused: bool
) -> None:
    """Sends, the bytes that kernels move, and the memory at the peak are those of the engine's code."""
    if not is_fused:
        monkeypatch.setattr(fused, "is_fused", lambda *_, **__: False)
    monkeypatch.setattr(Attention, "is_unfused_ring", not is_fused)
    head = 8 if is_fused else 2
    shape = replace(SHAPE, num_heads=4, num_key_heads=2, head_width=head, sequence_length=64 * num_workers)
    layout = Layout(context=num_workers, context_attention="ring", precision=precision, stack="stagewright")
    modeled, axis = attention(layout, shape), _Axis(num_workers, shape.sequence_length)
    (operator,) = modeled.operators()
    keys, gradients = modeled.sent_bytes(backward=False), modeled.gradient_bytes
    sent = [[keys] * (num_workers - 1), [keys, gradients] * (num_workers - 1) + [gradients]]
    triangle = 4 * 64**2
    scores, least = triangle * (num_workers + 1) // 2, 1 if is_fused else triangle // 2
    moved = [each * scores + 8 * triangle for each in {"bfloat16": (40, 58), "float32": (28, 52)}[precision]]
    done = 0
    for index, (counter, sends) in enumerate(_passes(axis, layout, shape, [_Traffic(least), _Traffic(least)])):
        assert axis.sends[done:] == sent[index]
        assert modeled.exchange(SLOW, backward=bool(index))[1] == sends - done + 1, "and an all-gather"
        if is_fused:  # and what attention reads and writes
            assert modeled._engine_bytes()[index] == pytest.approx(0.75 * counter.num_bytes, rel=0.35)
        else:
            assert counter.num_bytes == moved[index]
            assert counter.num_products == (2, 5)[index] * num_workers
        kernels = operator.backward_kernels if index else operator.kernels
        assert counter.num_kernels == pytest.approx(kernels, rel=0.4)
        done = sends
    counters = [AllocationCounter(), AllocationCounter()]
    assert len([*_passes(axis, layout, shape, counters)]) == 2
    assert counters[1].peak_bytes == pytest.approx(modeled.temporary_bytes, rel=0.15)
