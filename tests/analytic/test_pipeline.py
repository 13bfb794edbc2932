"""Closed forms of schedules against the simulator, for balanced stages with free links."""

from __future__ import annotations

import pytest

from made_profiles import equal_units, make_costs
from stagewright.analytic.layout import Layout
from stagewright.analytic.pipeline import RankTime, bubble_s, in_flight
from stagewright.simulator.simulate import step_seconds
from stagewright.spec.plan import Mesh


def rank_time(stages: int) -> RankTime:
    """Forward, input gradient and weight gradient of a stage take 1 s each."""
    return RankTime(
        forward_s=1.0 * stages, backward_s=2.0 * stages, compute_s=3.0 * stages, recompute_s=0.0, weight_s=1.0 * stages,
        collective_s=0.0, host_wait_s=0.0, message_s=0.0, hop_s=0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "stages", "ranks", "micro"),
    [
        ("gpipe", 1, 4, 8),
        ("gpipe", 1, 4, 2),
        ("1f1b", 1, 4, 8),
        ("interleaved", 2, 4, 8),
        ("interleaved", 3, 4, 4),
        ("looped-bfs", 2, 4, 6),
        ("looped-bfs", 2, 4, 2),
        ("interleaved-zero-bubble", 2, 4, 8),
        ("zbv", 2, 4, 8),
        ("dualpipev", 2, 4, 8),
    ],
)
def test_steps_equal_the_simulated_ones(schedule: str, stages: int, ranks: int, micro: int) -> None:
    layout = Layout(pipeline=ranks, virtual=stages, microbatches=micro, schedule=schedule)  # type: ignore[arg-type]
    costs = make_costs(
        equal_units(ranks * stages, 1.0, (1.0, 1.0)), mesh=Mesh(pipeline=ranks), microbatches=micro, schedule=schedule,
        stages=ranks * stages,
    )  # fmt: skip
    times = [rank_time(stages)] * ranks
    total_s = micro * times[0].total_s + bubble_s(layout, times, 0)
    assert total_s == pytest.approx(step_seconds(costs))


def test_in_flight() -> None:
    assert [in_flight(Layout(pipeline=4, microbatches=8), rank) for rank in range(4)] == [4, 3, 2, 1]
    assert in_flight(Layout(pipeline=4, microbatches=8, schedule="gpipe"), 3) == 8
    assert in_flight(Layout(pipeline=4, microbatches=8, virtual=2, schedule="zbv"), 3) == 4
    assert in_flight(Layout(pipeline=4, microbatches=2), 0) == 2, "fewer micro-batches than ranks"
