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
    """Layers of 1 s forward and 2 s backward, twice as long on slow devices; links of one activation per second
    between hosts, and of four inside them."""
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
        intra={name: {"4": [[], 8 * activation]} for name in devices},
    )


def constants(**fitted: float) -> Any:
    from profiled_plans import Constants

    return Constants(**{"gh200_upload": float("inf"), "mixed_upload": float("inf"), "gh200_allreduce": 1.0, **fitted})


def test_a_pipeline_of_two_stages(plan: Any, profiles: Any) -> None:
    from profiled_plans import forecast_s

    # An activation that arrives is gathered in 3/4 · 1/4 s. The second stage takes 2 + 4 + 3/16 s for a micro-batch,
    # then waits for its gradient and the next activation, 1 s each: 16 · (6 + 3/16 + 2). Before: 2 s forward; after:
    # a gather and 4 s of backward, but no further activation. Optimizer 0.5.
    gather = 3 / 16
    assert forecast_s(plan, profiles, constants()) == pytest.approx(2 + 16 * (8 + gather) + gather + 4 + 0.5)
    # The upload takes as long as a message, on arrival of each of the 16 activations and of the last gradient.
    activation = 2048 * 1024 * 4
    slower = forecast_s(plan, profiles, constants(mixed_upload=activation))
    assert slower - forecast_s(plan, profiles, constants()) == pytest.approx(17)


def test_a_layer_takes_no_longer_than_with_a_larger_microbatch(plan: Any, profiles: Any) -> None:
    from profiled_plans import Profiles

    table = profiles.layers["model"]["fast"]
    table["2"] = {"4": {str(layer): [0.75, 3.0, 0.5] for layer in range(4)}}
    assert isinstance(profiles, Profiles)
    assert profiles.layer_s(plan, "fast", 0, 0) == 0.75
    assert profiles.layer_s(plan, "fast", 0, 1) == 2.0


def test_replicas_wait_for_the_slowest_pipeline(plan: Any, profiles: Any) -> None:
    from profiled_plans import forecast_s

    mixed = replace(plan, devices=(("fast", "slow"), ("fast", "fast")))
    slow = replace(plan, devices=(("slow",), ("fast",)))
    # Two layers' gradients in a ring of two: 2 · 1/2 · 2 s.
    expected = forecast_s(slow, profiles, constants()) + 2
    assert forecast_s(mixed, profiles, constants()) == pytest.approx(expected)


def test_constants_are_fitted_on_half_of_the_plans(plan: Any, profiles: Any) -> None:
    from profiled_plans import fit, forecast_s

    truth = constants(mixed_upload=4e8, gh200_upload=4e8, gh200_allreduce=1.5)
    for name in ("fast", "slow"):  # the same profile under the name that the constants of the GH200 apply to
        profiles.layers["model"]["GH-96"] = profiles.layers["model"][name]
        profiles.links["GH-96"] = profiles.links[name]
        profiles.links["GH-96"]["4"]["us-central1-a"]["GH-96"] = {
            "4": profiles.links[name]["4"]["us-central1-a"][name]["4"]
        }
        profiles.intra["GH-96"] = profiles.intra[name]
    plans = []
    for number in range(12):
        devices = ((("GH-96", "GH-96"),) * 2, (("fast", "fast"),) * 2)[number % 2]
        made = replace(plan, name=f"plan {number}", devices=devices, microbatches=4 + number, allreduce_s=1.5 * 2)
        made = replace(made, step_s=forecast_s(made, profiles, truth))
        plans.append(made if made.fitted else replace(made, step_s=1.0, allreduce_s=100.0))
    found = fit(plans, profiles)
    assert found.gh200_allreduce == 1.5
    assert found.gh200_upload == pytest.approx(4e8, rel=0.06)
    assert found.mixed_upload == pytest.approx(4e8, rel=0.06)
