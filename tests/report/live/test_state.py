"""What is known of a run, folded from what it tells."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from stagewright.engine.worker.faults import Doing, Fault
from stagewright.report.live.changes import (
    ActivitySeen,
    Change,
    FaultSeen,
    MetricsLine,
    PlanRead,
    ProcessSeen,
    ResultRead,
)
from stagewright.report.live.fold import MAX_POINTS, fold
from stagewright.report.live.snapshot import action_kind, describe_error, snapshot
from stagewright.report.live.state import GONE_S, LiveState
from stagewright.runs.result import RunResult
from stagewright.spec.plan import Mesh, Plan


def folded(plan: Plan, *changes: Change) -> LiveState:
    state = fold(LiveState(name="r"), PlanRead(name="r", plan=plan, begun="2026-11-15T03:15:02+00:00"))
    for change in changes:
        state = fold(state, change)
    return state


def step(number: int, rank: int = 0, **values: Any) -> MetricsLine:
    told = {"kind": "step", "step": number, "epoch": 1, "loss": 1.0, "samples": 8, "seconds": 0.5, "waited_s": 0.1}
    return MetricsLine(rank=rank, values={**told, **values})


def begin(total: int = 10, batches: int = 5) -> MetricsLine:
    return MetricsLine(rank=0, values={"kind": "begin", "step": 0, "total": total, "batches": batches})


def test_nothing_is_there_yet() -> None:
    shown = snapshot(LiveState(name="runs"), 0.0)
    assert (shown["status"], shown["name"], shown["workers"], shown["error"]) == ("waiting", "runs", [], None)


def test_a_run_that_starts_has_boxes(plan: Plan) -> None:
    shown = snapshot(folded(plan), 0.0)
    assert shown["status"] == "starting"
    assert [(one["device"], one["stages"], one["condition"]) for one in shown["workers"]] == [
        ("cpu:0", [0], "absent"),
        ("cpu:1", [1], "absent"),
    ]


def test_numbers_of_training(plan: Plan) -> None:
    state = folded(plan, begin(), *(step(n, rank, waited_s=0.1 + 0.2 * rank) for n in (1, 2) for rank in (0, 1)))
    shown = snapshot(state, 0.0)
    assert shown["status"] == "running"
    assert (shown["step"], shown["total"], shown["epoch"], shown["epochs"]) == (2, 10, 1, 2)
    assert shown["samples_per_s"] == 16.0
    assert shown["bubble"] == pytest.approx((0.2 + 0.6) / 2)
    assert shown["remaining_s"] == 8 * 0.5
    assert [one["waited"] for one in shown["workers"]] == [0.2, 0.6]
    assert shown["curve"] == [[1, 1.0, 16.0], [2, 1.0, 16.0]]


def test_evaluations_count_in_the_remaining_time(plan: Plan) -> None:
    ended = {"kind": "epoch", "epoch": 1, "step": 5, "evaluation_s": 3.0, "accuracy": 0.75}
    state = folded(
        plan,
        begin(),
        *(step(n) for n in range(1, 6)),
        MetricsLine(rank=0, values=ended),
        MetricsLine(rank=1, values=ended),
    )
    shown = snapshot(state, 0.0)
    assert shown["remaining_s"] == 5 * 0.5 + 3.0
    assert (shown["metric"], shown["metric_value"], len(state.epochs)) == ("accuracy", 0.75, 1)


def test_a_measurement_counts_from_0_and_knows_its_steps(plan: Plan) -> None:
    measured = replace(plan, task=None, epochs=None, steps=4)
    state = folded(measured, MetricsLine(rank=1, values={"step": 0, "seconds": 0.25, "loss": 2.0, "waited_s": 0.0}))
    shown = snapshot(state, 0.0)
    assert (shown["step"], shown["total"], shown["samples_per_s"], shown["remaining_s"]) == (1, 4, 32.0, 0.75)


def test_the_slower_worker_s_line_of_a_step_is_no_news(plan: Plan) -> None:
    first, second = folded(plan, step(1, loss=3.0)), folded(plan, step(1, loss=3.0), step(1, 1, loss=9.0))
    assert first.loss == second.loss == 3.0
    assert len(second.curve) == 1


def test_a_worker_on_another_machine_is_not_said_to_be_missing(plan: Plan) -> None:
    shown = snapshot(folded(plan, step(1), ActivitySeen(rank=0, doing=Doing(count=1, action="forward"), at_s=0.0)), 0.0)
    assert [one["condition"] for one in shown["workers"]] == ["working", "elsewhere"]


def test_what_it_does(plan: Plan) -> None:
    doing = Doing(count=3, step=7, stage=1, microbatch=2, action="receive activation")
    shown = snapshot(folded(plan, ActivitySeen(rank=1, doing=doing, at_s=10.0)), 12.0)
    one = shown["workers"][1]
    assert (one["kind"], one["action"], one["microbatch"], one["still_s"]) == ("wait", "receive activation", 2, None)
    later = snapshot(folded(plan, ActivitySeen(rank=1, doing=doing, at_s=10.0)), 22.0)
    assert later["workers"][1]["still_s"] == 12.0
    # The same again is not progress.
    again = snapshot(
        folded(plan, ActivitySeen(rank=1, doing=doing, at_s=10.0), ActivitySeen(rank=1, doing=doing, at_s=21.0)), 22.0
    )
    assert again["workers"][1]["still_s"] == 12.0


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        ("forward", "forward"),
        ("backward (W)", "backward"),
        ("receive gradient", "wait"),
        ("gradient all-reduce", "collective"),
        ("optimizer", "optimizer"),
        ("load model", "prepare"),
        ("checkpoint", "prepare"),
        ("", "idle"),
        ("finish", "idle"),
    ],
)
def test_kinds(action: str, kind: str) -> None:
    assert action_kind(action) == kind


def test_a_fault_breaks_the_run_at_once_and_is_blamed(plan: Plan) -> None:
    peer = Fault(worker=0, kind="lost-peer", message="closed by peer", time_ns=5)
    doing = Doing(count=9, step=3, stage=1, microbatch=0, action="forward")
    cause = Fault(
        worker=1, kind="raised", message="ValueError: no", device="cpu:1", doing=doing, traceback="T", time_ns=9
    )
    shown = snapshot(folded(plan, step(3), FaultSeen(fault=peer), FaultSeen(fault=cause)), 0.0)
    assert shown["status"] == "failed"
    assert shown["error"] == {
        "worker": 1,
        "text": "worker 1 (cpu:1) failed: ValueError: no",
        "at": "step 3, stage 1, micro-batch 0, forward",
        "traceback": "T",
    }
    assert [one["condition"] for one in shown["workers"]] == ["lost", "broken"]
    assert shown["remaining_s"] is None


def test_the_launcher_s_verdict_counts_more(plan: Plan) -> None:
    hung = Fault(worker=0, kind="hung", message="no progress")
    shown = snapshot(
        folded(plan, FaultSeen(fault=hung, verdict=True), ResultRead(result=RunResult(status="failed", error="e"))), 0.0
    )
    assert shown["error"]["text"] == "worker 0 hangs: no progress"
    assert shown["workers"][0]["condition"] == "broken"


def test_a_failure_without_a_fault_is_told_from_the_result(plan: Plan) -> None:
    shown = snapshot(
        folded(plan, ResultRead(result=RunResult.from_dict({"status": "failed", "error": "out of luck\nline 2"}))), 0.0
    )
    assert (shown["error"]["text"], shown["error"]["traceback"]) == ("out of luck", "line 2")


@pytest.mark.parametrize("status", ["done", "interrupted", "failed"])
def test_the_result_is_the_last_word(plan: Plan, status: str) -> None:
    result = {"status": status, "ended": "2026-11-15T03:15:32+00:00"}
    shown = snapshot(folded(plan, step(1), ResultRead(result=RunResult.from_dict(result))), 9e9)
    assert shown["status"] == status
    assert shown["elapsed_s"] == 30.0
    assert {one["condition"] for one in shown["workers"]} == {"ended"}


def test_killed_without_a_result(plan: Plan) -> None:
    doing = Doing(count=4, step=2, action="forward")
    alive = [ProcessSeen(rank=rank, state="running", at_s=50.0) for rank in (0, 1)]
    gone = [ProcessSeen(rank=rank, state="gone", at_s=100.0) for rank in (0, 1)]
    state = folded(plan, ActivitySeen(rank=1, doing=doing, at_s=40.0), step(1), *alive, *gone)
    assert state.status(100.0 + GONE_S - 0.1) == "running", "it may still write its result"
    assert state.status(100.0 + GONE_S) == "killed"
    error = describe_error(state, 200.0)
    assert error is not None
    assert "ended without a result" in error["text"]
    assert error["at"] == "worker 1: step 2, forward"
    assert fold(state, ResultRead(result=RunResult.from_dict({"status": "done"}))).status(200.0) == "done"
    assert folded(plan, step(1), *alive, gone[0]).status(1000.0) == "running"


def test_found_dead_long_after(plan: Plan) -> None:
    gone = [ProcessSeen(rank=rank, state="gone", at_s=1000.0) for rank in (0, 1)]
    seen = [ActivitySeen(rank=rank, doing=Doing(count=1), at_s=10.0) for rank in (0, 1)]
    assert folded(plan, *seen, *gone).status(1000.0) == "killed"


def test_stopped_by_hand(plan: Plan) -> None:
    seen = ActivitySeen(rank=0, doing=Doing(count=4, action="forward"), at_s=0.0)
    shown = snapshot(folded(plan, seen, ProcessSeen(rank=0, state="stopped", at_s=1.0)), 1.0)
    assert shown["workers"][0]["condition"] == "stopped"


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number(plan: Plan, loss: float) -> None:
    shown = snapshot(folded(plan, step(1, loss=loss)), 0.0)
    assert (shown["loss"], shown["diverged"], shown["curve"]) == (None, True, [[1, None, 16.0]])
    json.dumps(shown, allow_nan=False)


def test_the_curve_stays_short_and_whole(plan: Plan) -> None:
    state = folded(plan, *(step(n, loss=float(n)) for n in range(1, 3001)))
    steps = [point[0] for point in state.curve]
    assert len(steps) <= MAX_POINTS
    assert steps == sorted(set(steps))
    assert all(loss == float(number) for number, loss, _ in state.curve)
    assert steps[-1] > 2900


def test_a_resolved_plan_keeps_what_is_known(plan: Plan) -> None:
    before = folded(plan, step(1), ActivitySeen(rank=0, doing=Doing(count=2, action="forward"), at_s=1.0))
    after = fold(before, PlanRead(name="r", plan=replace(plan, cuts=("a",))))
    assert (after.step, after.workers) == (1, before.workers)


def test_replicas_have_no_bubble_and_inference_no_loss(plan: Plan) -> None:
    replicas = replace(plan, mesh=Mesh(data=2), microbatches=1)
    assert snapshot(folded(replicas, step(1)), 0.0)["bubble"] is None
    inference = replace(plan, task=None, epochs=None, training=False)
    shown = snapshot(
        folded(inference, MetricsLine(rank=0, values={"step": 0, "seconds": 0.1, "batches": 10, "total": 3})), 0.0
    )
    assert (shown["loss"], shown["total"], shown["samples_per_s"]) == (None, 3, 80.0)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["kind", "step", "seconds", "loss", "total", "epoch", "waited_s", "x"]),
            st.none() | st.integers(0, 9) | st.sampled_from(["begin", "step", "epoch", "?"]),
        ),
        max_size=6,
    )
)
def test_lines_of_other_jobs_do_no_harm(lines: list[dict[str, Any]]) -> None:
    """Whatever JSON a job of someone's own writes, the page goes on."""
    from stagewright.spec.plan import ModelSpec

    state = folded(Plan(model=ModelSpec(name="m"), batch=2), *(MetricsLine(rank=0, values=values) for values in lines))
    json.dumps(snapshot(state, 0.0), allow_nan=False)
