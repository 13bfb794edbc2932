"""Steps put together from published profiles of layers and links."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest


@pytest.fixture
def plan(benchmark_paths: None) -> Any:
    """Two stages of two layers, four tensor ranks, 16 micro-batches."""
    from profiled_plans import MeasuredPlan

    return MeasuredPlan(
        name="two stages", model="model", width=1024, microbatch=1, microbatches=16, tensor=4,
        layers=((0, 1), (2, 3)), devices=(("fast",), ("fast",)), step_s=1.0,
    )  # fmt: skip


@pytest.fixture
def profiles(benchmark_paths: None) -> Any:
    """Layers of 1 s forward and 2 s backward, twice as long on slow devices; links of one activation per second."""
    from profiled_plans import ITEM_BYTES, LENGTH, ZONE, Profiles

    activation = LENGTH * 1024 * ITEM_BYTES
    devices = {"fast": 1.0, "slow": 2.0}
    return Profiles(
        layers={
            "model": {
                name: {"1": {"4": {str(layer): [scale, 2 * scale, 0.5] for layer in range(4)}}}
                for name, scale in devices.items()
            }
        },
        parameters={"model": {"1": {str(layer): {"params_floats": activation // ITEM_BYTES} for layer in range(4)}}},
        links={name: {"4": {ZONE: {other: {"4": [[], activation]} for other in devices}}} for name in devices},
    )


def test_a_pipeline_of_two_stages(plan: Any, profiles: Any) -> None:
    from profiled_plans import forecast_s

    # Stages of 6 s, an activation and a gradient of 1 s each: Σ tᵢ = 6 + 6 + 2, max tᵢ = 6 + 2, optimizer 0.5.
    assert forecast_s(plan, profiles, divided=True) == pytest.approx(14 + 15 * 8 + 0.5)
    # Four ranks that send whole activations share the link: 8 s there and back.
    assert forecast_s(plan, profiles, divided=False) == pytest.approx(20 + 15 * 14 + 0.5)


def test_replicas_wait_for_the_slowest_pipeline(plan: Any, profiles: Any) -> None:
    from profiled_plans import forecast_s

    mixed = replace(plan, devices=(("fast", "slow"), ("fast", "fast")))
    # The second replica's stages take 12 and 6 s; two layers' gradients in a ring of two: 2 · 1/2 · 2 s.
    assert forecast_s(mixed, profiles, divided=True) == pytest.approx(20 + 15 * 14 + 0.5 + 2)
