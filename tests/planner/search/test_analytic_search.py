"""The search with formulas: the forecast's own numbers, experts, few micro-batches, and the cost of a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import stagewright as sw
from stagewright.analytic.hardware.devices import efficient_device
from stagewright.analytic.hardware.named_cluster import named_cluster
from stagewright.analytic.models import load_shape
from stagewright.errors import UsageError
from stagewright.planner.search.analytic import AnalyticSearch
from stagewright.planner.search.price import device_counts
from stagewright.spec.plan import Plan

LARGE = {"analytic": True, "precision": "bf16", "innermost": "tensor"}


def test_plan_and_forecast_agree(tmp_path: Path) -> None:
    result = sw.plan("gpt3-175b", cluster="16x8xa100", batch=256, **LARGE)  # type: ignore[arg-type]
    assert len(result.search.best) == 10
    for ranked in result.search.best:
        ranked.plan.write(tmp_path / "plan.toml")
        found = sw.forecast(tmp_path / "plan.toml", cluster="16x8xa100", analytic=True, innermost="tensor")
        assert found.step_s == ranked.forecast.step_s
        assert found.peak_memory_bytes == ranked.forecast.peak_memory_bytes
        assert ranked.forecast.fits
    assert result.search.best == sorted(result.search.best, key=lambda ranked: ranked.forecast.step_s)
    assert result.search.num_plans > 100


def test_divisions_and_sharded_stages_pay_off_for_a_large_model() -> None:
    """70 B parameters on 64 GPUs: divided sequence and vocabulary, ZeRO and FSDP in pipelines against none of them."""
    shape, cluster = load_shape("llama-3-70b", None), named_cluster("8x8xh100")
    base = Plan.of("llama-3-70b", 256, precision="bf16-mixed")
    search = AnalyticSearch(base=base, shape=shape, cluster=cluster, device=efficient_device(cluster, None))
    schedules = ("1f1b", "interleaved")
    plain = search.search(schedules=schedules, zeros=(0,), with_divisions=False, top=10**6)
    without = next(ranked for ranked in plain.best if not (ranked.plan.shard and ranked.plan.mesh.pipeline > 1))
    best = search.search(schedules=schedules).best[0]
    assert best.plan.sequence_parallel
    assert best.plan.vocab_parallel
    assert without.forecast.step_s >= 1.2 * best.forecast.step_s


def test_experts_are_planned() -> None:
    result = sw.plan("mixtral-8x7b", cluster="8x8xh100", batch=256, schedules=["gpipe"], **LARGE)  # type: ignore[arg-type]
    best = result.search.best[0]
    assert best.forecast.fits
    plain = result.search.data_parallel
    assert plain is not None
    # 46.7 billion parameters, of which a token visits 12.9, with gradients and two states of 16 bits.
    assert plain.forecast.peak_memory_bytes > 8 * 46.7e9
    assert not plain.forecast.fits


def test_fewer_micro_batches_than_ranks() -> None:
    result = sw.plan("llama-2-7b", cluster="8xa100", batch=2, schedules=["gpipe", "1f1b"], top=200, **LARGE)  # type: ignore[arg-type]
    assert any(ranked.plan.microbatches < ranked.plan.mesh.pipeline for ranked in result.search.best)


def test_price_chooses_fewer_devices() -> None:
    cluster = named_cluster("4x8xa100")
    cluster = replace(cluster, devices=(replace(cluster.devices[0], price=2.0),))
    options = {"batch": 64, "schedules": ["1f1b"], "sequence_length": 2048, **LARGE}
    fast = sw.plan("llama-2-7b", cluster=cluster, **options)  # type: ignore[arg-type]
    cheap = sw.plan("llama-2-7b", cluster=cluster, price=True, **options)  # type: ignore[arg-type]
    first = cheap.search.best[0]
    assert fast.search.best[0].plan.mesh.num_workers == 32
    assert first.plan.mesh.num_workers < 32, "collectives between hosts cost time of all devices"
    assert first.price_per_step == pytest.approx(first.plan.mesh.num_workers * 2.0 * first.forecast.step_s / 3600)
    prices = [ranked.price_per_step or 0.0 for ranked in cheap.search.best]
    assert prices == sorted(prices)
    assert prices[0] < 32 * 2.0 * fast.search.best[0].forecast.step_s / 3600
    assert "cost of a step" in str(cheap)
    with pytest.raises(UsageError, match=r"the cluster states no price: write price = 2\.5"):
        sw.plan("llama-2-7b", cluster="8xa100", price=True, **options)  # type: ignore[arg-type]


def test_device_counts() -> None:
    assert device_counts(12) == [12, 6, 3, 1]
    assert device_counts(1) == [1]


def test_refused() -> None:
    with pytest.raises(UsageError, match="--verify runs plans here"):
        sw.plan("llama-2-7b", cluster="8xa100", analytic=True, verify=True)
    with pytest.raises(UsageError, match="an efficiency of 2 is not possible"):
        sw.plan("llama-2-7b", cluster="8xa100", analytic=True, efficiency=2)
    with pytest.raises(UsageError, match="no plan for a batch of 8 fits on 8 devices"):
        sw.plan("gpt3-175b", cluster="8xa100", analytic=True, batch=8)
