"""Orders for the costs of a plan: never worse than a built-in schedule, within memory, and read by the forecast."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from made_profiles import make_costs, profile_of, unit
from stagewright.cluster.cluster import Cluster, DeviceGroup, Link, Links
from stagewright.errors import UsageError
from stagewright.profiler.profile import Profile
from stagewright.schedules.rules import FIXED_SCHEDULES
from stagewright.simulator.costs.overheads import EngineOverheads, ModelOverheads
from stagewright.simulator.costs.plan_costs import PlanCosts
from stagewright.simulator.order_search import with_order
from stagewright.simulator.simulate import predict
from stagewright.spec.plan import Mesh
from stagewright.spec.plan_rules import check_plan

LINK = Links(intra_host=Link(bandwidth_bytes_per_s=100.0, latency_s=0.02))


def unequal(count: int, seed: int) -> Profile:
    rng = random.Random(seed)
    return profile_of(
        [unit(f"u{index}", rng.uniform(0.5, 2), (rng.uniform(0.5, 2), rng.uniform(0.5, 2))) for index in range(count)]
    )


def costs_of(schedule: str, profile: Profile, *, limit: int | None = None, **fields: Any) -> PlanCosts:
    workers = fields.get("mesh", Mesh(pipeline=3)).num_workers
    device = DeviceGroup(kind="cpu", count=workers, memory_bytes=limit)
    overheads = ModelOverheads(split_input=1.1, split_weight=1.2, optimizer_s_per_byte=0.004, split_held_share=0.1)
    return make_costs(
        profile,
        schedule=schedule,
        cluster=Cluster(devices=(device,), links=LINK),
        terms={"model_overheads": overheads, "engine_overheads": EngineOverheads(action_s=0.01)},
        **{"mesh": Mesh(pipeline=3), "microbatches": 6, **fields},
    )


@pytest.mark.parametrize("mesh", [Mesh(pipeline=3), Mesh(data=2, pipeline=3)], ids=str)
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize(("stages", "placement"), [(3, "in-order"), (6, "in-order"), (6, "v")])
def test_not_worse_than_a_built_in_schedule(stages: int, placement: str, limited: bool, mesh: Mesh) -> None:
    profile = unequal(6, stages)
    fields = {"stages": stages, "placement": placement, "mesh": mesh}
    built_in = {}
    for name in FIXED_SCHEDULES:
        costs = costs_of(name, profile, **fields)
        try:
            check_plan(costs.plan)
        except UsageError:
            continue
        built_in[name] = predict(costs)
    limit = min(one.peak_memory_bytes for one in built_in.values()) if limited else None
    costs, forecast = with_order(costs_of("searched", profile, limit=limit, **fields), max_timed_actions=60_000)
    check_plan(costs.plan)
    assert forecast.fits
    assert forecast.step_s == predict(costs).step_s
    steps = [one.step_s for one in built_in.values() if limit is None or one.peak_memory_bytes <= limit]
    assert steps
    assert forecast.step_s <= min(steps)


def test_more_memory_is_not_slower_and_pays() -> None:
    profile = unequal(4, 2)
    fields: dict[str, Any] = {"mesh": Mesh(pipeline=4), "microbatches": 8}
    least = predict(costs_of("1f1b", profile, **fields)).peak_memory_bytes
    tight, wide = (with_order(costs_of("searched", profile, limit=limit, **fields))[1] for limit in (least, 2 * least))
    assert tight.fits
    assert wide.fits
    assert tight.peak_memory_bytes <= least < wide.peak_memory_bytes
    assert wide.step_s < 0.97 * tight.step_s < 0.95 * predict(costs_of("1f1b", profile, **fields)).step_s


def test_where_nothing_fits_the_smallest_order_says_so() -> None:
    costs, forecast = with_order(costs_of("searched", unequal(3, 0), limit=100), max_timed_actions=10_000)
    assert costs.plan.actions
    assert not forecast.fits


def test_recomputed_stages_are_not_split() -> None:
    costs = costs_of("searched", unequal(3, 1), recompute=(False, True, False))
    ordered, _ = with_order(costs, max_timed_actions=60_000)
    assert "I" not in ordered.plan.actions[1]
    assert with_order(replace(costs, plan=ordered.plan), max_timed_actions=60_000)[0].plan == ordered.plan
