"""Whole steps: published ones, what changes them, memory, and models with experts."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import stagewright as sw
from stagewright.analytic.forecast import forecast_layout
from stagewright.analytic.hardware.named_cluster import named_cluster
from stagewright.analytic.layout import Layout
from stagewright.analytic.models import known_models, load_shape
from stagewright.analytic.shape import TransformerShape
from stagewright.cluster.cluster import Cluster, DeviceGroup
from stagewright.errors import UsageError
from stagewright.report.tables.analytic import analytic_summary, memory_table

# Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, table 5: seconds of a step with
# full recomputation, and with sequence parallelism and selective recomputation.
MEGATRON = {
    (48, 6144, 64): ("tp=8,mbs=4,m=1", 1, 1.42, 1.10),
    (96, 12288, 96): ("tp=8,pp=8,vp=3,m=64", 8, 18.13, 13.75),
    (105, 20480, 128): ("tp=8,pp=35,vp=3,m=280", 35, 49.05, 37.83),
    (128, 25600, 160): ("tp=8,pp=64,m=512", 64, 94.42, 71.49),
}


def gpt(layers: int, width: int, heads: int) -> TransformerShape:
    return TransformerShape(
        num_layers=layers, width=width, num_heads=heads, num_key_heads=heads, feed_forward=4 * width, num_matrices=2,
        vocabulary=51200, sequence_length=2048, tied=True, dropout=True,
    )  # fmt: skip


def test_published_steps_of_megatron() -> None:
    errors = []
    for size, (text, hosts, full, selective) in MEGATRON.items():
        layout = replace(Layout.parse(text), attention="unfused", precision="float16")
        cluster = named_cluster(f"{hosts}x8xa100")
        for changes, measured in (
            ({"recompute": "full"}, full),
            ({"recompute": "selective", "sequence_parallel": True}, selective),
        ):
            forecast = forecast_layout(gpt(*size), replace(layout, **changes), cluster)  # type: ignore[arg-type]
            errors.append(forecast.step_s / measured - 1)
            assert forecast.low_s < measured < forecast.high_s
    assert max(abs(error) for error in errors) < 0.105
    assert sum(abs(error) for error in errors) / 8 < 0.05


def forecast(text: str, model: str = "gpt3-175b", cluster: str = "8x8xa100", **options: Any) -> sw.AnalyticForecast:
    return sw.forecast(text, model=model, cluster=cluster, analytic=True, **options)


def test_what_changes_a_step() -> None:
    base = forecast("tp=8,pp=8,m=32")
    assert forecast("tp=8,pp=8,m=32,recompute=full").step_s > 1.2 * base.step_s
    assert forecast("tp=8,pp=8,m=32,vp=3").parts["bubble"] == pytest.approx(base.parts["bubble"] / 3, rel=0.05)
    assert forecast("tp=8,pp=8,m=4").step_s < base.step_s, "fewer micro-batches than ranks are allowed"
    undivided = forecast("tp=8,pp=8,m=32,divided_vocabulary=false")
    assert undivided.step_s > 1.01 * base.step_s
    assert base.tokens_per_s == pytest.approx(32 * 2048 / base.step_s)
    assert 0.2 < base.mfu < 0.7
    assert sum(base.parts.values()) == pytest.approx(base.step_s, rel=0.01)


@pytest.mark.parametrize(
    ("stack", "ranks", "micro", "messages"),
    [
        ("megatron", 2, 1, 2),  # to the last rank and back
        ("megatron", 4, 1, 6),
        ("megatron", 4, 8, 6 + 7 * 2),
        ("nanotron", 2, 8, 2 + 7 * 2),
        ("nanotron", 4, 8, 6 + 7 * 4),  # a rank inside exchanges with both neighbors
    ],
)
def test_messages_of_a_step(stack: str, ranks: int, micro: int, messages: int) -> None:
    text = f"tp=8,pp={ranks},m={micro},stack={stack}"
    free, slow = (forecast(f"{text},message_stall_s={seconds}") for seconds in (0, 10))
    assert slow.step_s - free.step_s == pytest.approx(10 * messages, rel=1e-6)


def test_host_time_of_tensor_ranks_across_hosts() -> None:
    """nanotron's pipelines wait for the host, longer for each rank of a group that spans hosts."""
    waits = [
        forecast(f"tp={ranks},pp=2,dp={128 // (2 * ranks)},m=32,sp,stack=nanotron", cluster="16x8xh100").parts["host"]
        for ranks in (4, 8, 16, 32)
    ]
    assert waits[0] < waits[1] < waits[2] < waits[3]
    assert waits[3] / waits[2] == pytest.approx(2, rel=0.25)


def test_memory() -> None:
    base = forecast("tp=8,pp=4,dp=2,m=32")
    first, *_, last = base.memory
    assert first.activations_bytes == pytest.approx(4 * last.activations_bytes, rel=0.01), (
        "1F1B: four in flight, then one"
    )
    assert first.largest == "optimizer"
    sharded = forecast("tp=8,pp=4,dp=2,m=32,zero=1").memory[0]
    assert sharded.optimizer_bytes == pytest.approx(first.optimizer_bytes / 2)
    assert sharded.gradients_bytes == first.gradients_bytes
    whole = forecast("tp=8,pp=4,dp=2,m=32,zero=3").memory[0]
    assert whole.parameters_bytes == pytest.approx(first.parameters_bytes / 2)
    checkpointed = forecast("tp=8,pp=4,dp=2,m=32,recompute=full").memory[0]
    assert checkpointed.activations_bytes < 0.17 * first.activations_bytes
    parallel = forecast("tp=8,pp=4,dp=2,m=32,sp").memory[0]
    assert parallel.activations_bytes < 0.7 * first.activations_bytes
    assert not forecast("tp=8,m=1").fits, "175 billion parameters on eight devices"


def test_experts_are_counted() -> None:
    mixtral = load_shape("mixtral-8x7b")
    assert mixtral.parameters == pytest.approx(46.7e9, rel=0.01)
    assert mixtral.active_parameters == pytest.approx(12.9e9, rel=0.01)
    assert load_shape("deepseek-v3").parameters == pytest.approx(671e9, rel=0.01)
    assert load_shape("deepseek-v3").active_parameters == pytest.approx(37.5e9, rel=0.02)
    assert load_shape("llama-3-405b").parameters == pytest.approx(405.8e9, rel=0.01)
    alone = forecast("dp=8,m=8,zero=1", model="mixtral-8x7b", cluster="8xb200")
    spread = forecast("dp=8,ep=8,m=8,zero=1", model="mixtral-8x7b", cluster="8xb200")
    assert spread.memory[0].parameters_bytes < 0.3 * alone.memory[0].parameters_bytes
    assert spread.parts["tensor collectives"] > alone.parts["tensor collectives"], "tokens travel to their experts"


def test_layouts_that_do_not_divide_the_model() -> None:
    for text, model, words in (
        ("tp=7", "gpt3-175b", "7 tensor parallel ranks do not divide the model's 96 heads"),
        ("dp=16,ep=16", "mixtral-8x7b", "16 expert parallel ranks do not divide the model's 8 experts"),
        ("cp=3", "gpt3-175b", "3 context parallel ranks do not divide a sequence of 2048 tokens"),
        ("pp=4,layers=90-2-2-1", "gpt3-175b", "95 blocks, but the model 96"),
    ):
        with pytest.raises(UsageError, match=words):
            forecast(text, model=model)
    with pytest.raises(UsageError, match="a layout states the order of its ranks"):
        forecast("tp=8", innermost="tensor")


def test_uneven_shares_of_a_sequence() -> None:
    """Of 2047 tokens the larger of two shares has 1024, as of 2048; messages of the engine carry whole sequences."""
    shape = gpt(4, 1024, 16)
    cluster = named_cluster("8xa100")

    def forecast_of(length: int, context: int, pipeline: int = 1) -> sw.AnalyticForecast:
        layout = Layout(
            context=context, pipeline=pipeline, context_attention="ring", stack="stagewright", divided_vocabulary=False
        )
        return forecast_layout(replace(shape, sequence_length=length), layout, cluster)

    uneven, even = forecast_of(2047, 2), forecast_of(2048, 2)
    assert uneven.memory[0].activations_bytes == pytest.approx(even.memory[0].activations_bytes, rel=1e-3)
    assert uneven.step_s == pytest.approx(even.step_s, rel=1e-3)
    assert forecast_of(2047, 3).parts["compute"] < uneven.parts["compute"]
    assert forecast_of(2048, 4, 2).parts["messages"] == pytest.approx(forecast_of(2048, 1, 2).parts["messages"])
    with pytest.raises(UsageError, match="4 context parallel ranks can't divide a sequence of 3 tokens"):
        forecast_of(3, 4)


def test_the_order_of_ranks() -> None:
    """Tensor ranks inside a host are much faster than those that are eight apart."""
    inside, across = (forecast(f"tp=8,pp=8,m=32,order={order}") for order in ("tp-pp-dp", "pp-tp-dp"))
    assert across.parts["tensor collectives"] > 5 * inside.parts["tensor collectives"]
    assert across.parts["messages"] < inside.parts["messages"]


def test_unequal_devices() -> None:
    """Each pipeline rank has the memory of its own devices, and blocks by their speed."""
    groups = [
        DeviceGroup(kind="cuda", count=4, memory_bytes=size << 30, hardware=name)
        for name, size in (("A100", 80), ("V100", 16))
    ]
    cluster = Cluster(devices=tuple(groups), links=named_cluster("8xa100").links)
    uneven, even = (
        sw.forecast(f"tp=4,pp=2,m=16,layers={layers}", model="llama-2-7b", cluster=cluster, analytic=True)
        for layers in ("24-8", "16-16")
    )
    assert uneven.rank_limits_bytes == (80 << 30, 16 << 30)
    assert uneven.peak_memory_bytes > 16 << 30 > uneven.memory[1].peak_bytes
    assert uneven.fits, "the full rank is on the large devices"
    assert (even.fits, even.ranks_above_limit) == (False, (1,))
    assert even.step_s > 1.5 * uneven.step_s
    assert "does not fit on 1 of 2 pipeline ranks" in analytic_summary(even)[0]
    assert len(memory_table(even).columns) == len(memory_table(forecast("tp=8")).columns) + 1, "a column of limits"
    useful = load_shape("llama-2-7b").model_flops_per_token * uneven.tokens_per_s
    assert uneven.mfu == pytest.approx(useful / (4 * 312e12 + 4 * 125e12))
    plan = sw.Plan.of("llama-2-7b", 16, "tensor=4,pipeline=2", microbatches=16, precision="bf16")
    found = sw.forecast(plan, cluster=cluster, analytic=True, innermost="tensor")
    assert found.memory[0].parameters_bytes > 2 * found.memory[1].parameters_bytes


def test_a_plan_that_plan_wrote_is_forecast(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(known_models()["llama-2-7b"]))
    plan = sw.Plan.of(f"hf:{tmp_path}/m", 64, "data=4,tensor=2", microbatches=4, precision="bf16")
    result = sw.forecast(plan, cluster="8xa100", analytic=True)
    assert result.num_devices == 8
    assert result.step_s > 0.5
    assert "step" in str(result)
    with pytest.raises(UsageError, match="give a cluster, like 8xh100"):
        sw.forecast(plan, analytic=True)
    with pytest.raises(UsageError, match="needs 8 devices, but the cluster has 4"):
        sw.forecast(plan, cluster="4xa100", analytic=True)
    with pytest.raises(UsageError, match="add analytic=True"):
        sw.forecast("tp=2", model="llama-2-7b")  # type: ignore[call-overload]


def test_two_hundred_forecasts_a_second() -> None:
    forecast("tp=8,pp=8,m=64,sp")
    begin = time.process_time()
    for count in range(1, 101):
        forecast(f"tp=8,pp=8,m={count},sp")
    assert time.process_time() - begin < 0.5
