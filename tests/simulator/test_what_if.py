"""The parts of a speed-up add up, and each is what it is called."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from made_profiles import equal_units, make_costs, profile_of, unit
from stagewright.cluster.cluster import FREE, Link, Links
from stagewright.profiler.profile import Amount
from stagewright.simulator.costs.overheads import EngineOverheads, ModelOverheads
from stagewright.simulator.simulate import optimizer_s, step_seconds
from stagewright.simulator.what_if import (
    LOSSES,
    explain_speedup,
    with_links,
    with_perfect_balance,
    without_communication,
)
from stagewright.spec.plan import Mesh

SLOW = Links(intra_host=Link(bandwidth_bytes_per_s=10.0, latency_s=0.0))
TERMS = {
    "engine_overheads": EngineOverheads(action_s=0.01, step_s=0.1, contention=0.1, collective_share=0.3),
    "model_overheads": ModelOverheads(optimizer_s_per_byte=0.001, accumulate_s_per_byte=0.001, loss_forward_s=0.1),
}


@settings(deadline=None, max_examples=40)
@given(
    p=st.sampled_from([1, 2, 4]),
    data=st.sampled_from([1, 2]),
    m=st.integers(4, 8),
    recompute=st.sampled_from(["none", "always", "except-last"]),
    times=st.lists(st.floats(0.1, 5), min_size=4, max_size=4),
)
def test_parts_add_up(p: int, data: int, m: int, recompute: str, times: list[float]) -> None:
    profile = profile_of([unit(f"u{at}", one, (one, one)) for at, one in enumerate(times)])
    mesh = Mesh(pipeline=p, data=data)
    costs = make_costs(profile, mesh=mesh, microbatches=m, links=SLOW, recompute=recompute, terms=TERMS)
    found = explain_speedup(costs)
    assert {one.name for one in found.parts} <= set(LOSSES)
    assert found.ideal_s + sum(one.seconds for one in found.parts) == pytest.approx(step_seconds(costs))
    assert found.num_devices - sum(lost for _, lost in found.lost_speedup()) == pytest.approx(found.speedup)
    measured = explain_speedup(costs, measured_s=100.0)
    assert measured.ideal_s + sum(one.seconds for one in measured.parts) == pytest.approx(100.0)


def seconds(costs: object, name: str) -> float:
    return {one.name: one.seconds for one in explain_speedup(costs).parts}[name]  # type: ignore[arg-type]


def test_each_part_alone() -> None:
    """Balanced stages with free links lose by the bubble alone: (p − 1)(F + B)."""
    balanced = make_costs(equal_units(4), mesh=Mesh(pipeline=4), microbatches=8)
    found = {one.name: one.seconds for one in explain_speedup(balanced).parts}
    assert found.pop("bubble") == pytest.approx(3 * 3)
    assert all(abs(value) < 1e-9 for value in found.values())
    uneven = profile_of([unit("a", 1, (1, 1)), unit("b", 3, (3, 3))])
    assert seconds(make_costs(uneven, mesh=Mesh(pipeline=2), microbatches=8), "imbalance") == pytest.approx(8 * 3)
    again = make_costs(equal_units(2), mesh=Mesh(pipeline=2), microbatches=8, recompute="always")
    assert seconds(again, "recomputation") == pytest.approx(9)
    tied = make_costs(equal_units(2), mesh=Mesh(pipeline=2), microbatches=8, links=SLOW)
    assert seconds(tied, "transfer") > 0
    assert seconds(tied, "collectives") == 0
    summed = make_costs(equal_units(2), mesh=Mesh(data=2), links=SLOW)
    # One bucket of 200 bytes, and the loss's 8.
    assert seconds(summed, "collectives") == pytest.approx(20 + 0.8)
    repeated = make_costs(
        equal_units(1), mesh=Mesh(data=2), terms={"model_overheads": ModelOverheads(optimizer_s_per_byte=0.01)}
    )
    assert seconds(repeated, "repeated work") == pytest.approx(0.5), "each replica steps, one alone would step once"


def test_a_pipeline_repeats_nothing() -> None:
    """Micro-batches take 3 s on each of two workers; of the whole batch one device alone would take 2 s for each."""
    costs = make_costs(equal_units(2), mesh=Mesh(pipeline=2), microbatches=8)
    slower = explain_speedup(replace(costs, serial_s=costs.serial_s * 2 / 3))
    found = {one.name: one.seconds for one in slower.parts}
    assert "repeated work" not in found
    assert found["micro-batching overhead"] == pytest.approx(8 * 3 / 3)
    assert slower.ideal_s + sum(found.values()) == pytest.approx(slower.step_s)


def test_halves_are_no_recomputation() -> None:
    terms = {"model_overheads": ModelOverheads(split_input=1.5, split_weight=2.0)}
    costs = make_costs(equal_units(4), mesh=Mesh(pipeline=2), microbatches=8, schedule="zbv", terms=terms)
    assert seconds(costs, "recomputation") == pytest.approx(0)
    assert seconds(costs, "split backward") > 1
    plain = make_costs(equal_units(2), mesh=Mesh(pipeline=2), microbatches=8, terms=terms)
    assert seconds(plain, "split backward") == pytest.approx(0)


def test_what_if() -> None:
    costs = make_costs(equal_units(2), mesh=Mesh(pipeline=2), microbatches=4, links=SLOW)
    free = make_costs(equal_units(2), mesh=Mesh(pipeline=2), microbatches=4)
    assert step_seconds(without_communication(costs)) == step_seconds(free) == 15
    uneven = profile_of([unit("a", 1, (1, 1)), unit("b", 3, (3, 3))])
    assert step_seconds(with_perfect_balance(make_costs(uneven, mesh=Mesh(pipeline=2), microbatches=4))) == 30
    faster = with_links(costs.topology.cluster, 1e9, None)
    assert faster.links.intra_host == Link(bandwidth_bytes_per_s=1e9, latency_s=0.0)


def test_perfect_balance_leaves_no_imbalance() -> None:
    """The second stage has more to compute, nine times the parameters to step and to add up, and the loss."""
    uneven = [unit("a", 1, (1, 1)), unit("b", 3, (3, 3), parameter_bytes=Amount(total=900))]
    terms = TERMS | {
        "model_overheads": ModelOverheads(optimizer_s_per_byte=0.01, accumulate_s_per_byte=0.01, loss_forward_s=1)
    }
    costs = make_costs(profile_of(uneven), mesh=Mesh(pipeline=2), microbatches=4, terms=terms)
    balanced = with_perfect_balance(costs)
    assert seconds(costs, "imbalance") > 1
    assert seconds(balanced, "imbalance") == pytest.approx(0)
    assert [optimizer_s(balanced, worker) for worker in (0, 1)] == pytest.approx([5 * 1.1] * 2)
    assert balanced.stages[0].accumulate_s == balanced.stages[1].accumulate_s == pytest.approx(5 * 1.1)
    assert [one.parameter_bytes for one in balanced.stages] == [100, 900], "memory stays where it is"


def test_other_links_do_not_take_what_sums_were_measured_to_take() -> None:
    """A sum of 200 bytes was measured to take 7 s; of 100 bytes/s and no latency, 2 s."""
    measured = Links(intra_host=SLOW.intra_host, collective=SLOW.intra_host, sums=((8, 0.5), (200, 7.0), (400, 14.0)))
    costs = make_costs(equal_units(2), mesh=Mesh(data=2), links=measured)
    loss_s = 0.5
    assert step_seconds(costs) == pytest.approx(6 + 7 + loss_s)
    assert step_seconds(without_communication(costs)) == 6
    cluster = with_links(costs.topology.cluster, 100.0, None)
    changed = make_costs(equal_units(2), mesh=Mesh(data=2), cluster=cluster)
    assert step_seconds(changed) == pytest.approx(6 + 2 + 0.08)
    tied = [unit("a", 1, (1, 1)), unit("b", 1, (1, 1), parameter_bytes=Amount(total=200, shares=((0, 200),)))]
    pipeline = make_costs(profile_of(tied), mesh=Mesh(pipeline=2), links=replace(measured, intra_host=FREE))
    assert step_seconds(pipeline) == pytest.approx(6 + 7), "the tied weight's gradient is summed by both of its holders"


def test_averaging_statistics_is_a_collective() -> None:
    terms = {"model_overheads": ModelOverheads(statistics_s=2.0, statistics_bytes=40)}
    profile = equal_units(1, buffer_bytes=8)
    parts = explain_speedup(make_costs(profile, mesh=Mesh(data=2), terms=terms))
    assert {part.name: part.seconds for part in parts.parts if part.seconds} == {"collectives": pytest.approx(2.0)}
    free = without_communication(make_costs(profile, mesh=Mesh(data=2), terms=terms))
    assert step_seconds(free) == pytest.approx(3.0)
