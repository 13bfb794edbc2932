"""Where a step goes: every number of a step made by hand, and the law that the parts add up."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from runs import pipeline_rows, pipeline_run, row, write_run
from stagewright.errors import UsageError
from stagewright.report.timeline import trace_timeline
from stagewright.report.timeline_text import timeline_text
from stagewright.spec.plan import Mesh
from stagewright.trace.breakdown import PARTS, breakdown, schedule_idle
from stagewright.trace.events import Trace, TraceEvent, WorkerTrace
from stagewright.trace.read import read_trace


def test_a_pipeline(tmp_path: Path) -> None:
    trace = read_trace(pipeline_run(tmp_path))
    # With free links: worker 1 is busy from 1 to 7 s, worker 0 ends at 9 s, its optimiser at 9.5 s; each works 6.5 s.
    assert schedule_idle(trace, 0) == {0: 3.0, 1: 3.0}
    first, second = breakdown(trace, 0)
    # Gradient 0 was sent at 4.25 s, gradient 1 at 7.5 s: until then worker 0 waited, from then on they were on the way.
    waited = (4.25 - 2.25) + (7.5 - 6.75)
    assert first.parts() == {
        "compute": 6.5,
        "transfer": 0.25 + 0.5 + 0.5,
        "collective": 1.0,
        "wait": 0.0,
        "bubble": waited,
        "overhead": 0.5,
    }
    # Worker 1 came to the loss at 8.25 s, worker 0 at 10.5 s; the message that it began with left at 1 s.
    assert second.bubble_s == (1.0 - 0.5) + (10.5 - 8.25)
    assert second.transfer_s == 0.25 + 0.25 + 0.25
    assert second.collective_s == 1.0
    assert (first.step_s, second.step_s) == (12.0, 11.5)
    assert first.optimizer_s == 0.5
    assert first.recompute_s == 0.0


def test_waiting_beyond_the_schedules_is_wait(tmp_path: Path) -> None:
    rows = pipeline_rows()
    late = [
        {**one, "start_s": one["start_s"] + 2, "end_s": one["end_s"] + 2} if one["start_s"] > 101 else one
        for one in rows[1]
    ]  # worker 1 idles for 2 s after its first message, for no reason that the schedule knows
    late = [{**one, "end_s": 114.0} if one["kind"] in ("step", "collective") else one for one in late]
    behind = [
        {
            **one,
            "start_s": one["start_s"] + 2 * (one["start_s"] > 104),
            "end_s": one["end_s"] + 2 * (one["end_s"] > 104),
        }
        for one in rows[0]
    ]
    first, second = breakdown(read_trace(write_run(tmp_path, "pipeline=2", [behind, late], microbatches=2)), 0)
    assert first.bubble_s == 3.0
    assert first.wait_s == 2.75 + 2 - 3.0
    assert second.overhead_s >= 2.0
    assert math.isclose(sum(first.parts().values()), first.step_s)


def test_what_is_nested_counts_once(tmp_path: Path) -> None:
    rows = [
        row("step", 0, 10),
        row("forward", 0, 4, stage=0, microbatch=0),
        row("collective", 1, 2, stage=0, microbatch=0, note="tensor"),
        row("backward", 4, 9, stage=0, microbatch=0),
        row("recompute", 4, 7, stage=0, microbatch=0),
        row("collective", 5, 6, stage=0, microbatch=0, note="tensor"),
    ]
    others = [{**one, "start_s": one["start_s"] + 0.5} if one["kind"] == "collective" else one for one in rows]
    first, second = breakdown(read_trace(write_run(tmp_path, "tensor=2", [rows, others])), 0)
    assert (first.compute_s, first.collective_s, first.wait_s, first.overhead_s) == (7.0, 1.0, 1.0, 1.0)
    assert (second.compute_s, second.collective_s, second.wait_s) == (8.0, 1.0, 0.0)
    assert (first.recompute_s, second.recompute_s) == (2.0, 2.5)
    assert first.bubble_s == 0.0, "where nothing is sent there is no schedule to make one"


def test_a_collective_beside_computing_costs_nothing_until_it_is_waited_for(tmp_path: Path) -> None:
    rows = [
        row("step", 0, 6),
        row("backward", 0, 5, stage=0, microbatch=0),
        row("collective", 1, 5, stream="collective", note="data"),
        row("collective", 4, 5, stage=0, microbatch=0, note="data"),
    ]
    (share, _) = breakdown(read_trace(write_run(tmp_path, "data=2", [rows, rows])), 0)
    assert share.parts() == dict.fromkeys(PARTS, 0.0) | {"compute": 4.0, "collective": 1.0, "overhead": 1.0}


def test_waiting_until_messages_have_left(tmp_path: Path) -> None:
    first = [
        row("step", 0, 10),
        row("forward", 0, 1, stage=0, microbatch=0),
        row("send", 1, 1.5, stage=0, microbatch=0, peer=1, note="activation"),
        row("forward", 1.5, 2.5, stage=0, microbatch=1),
        row("send", 2.5, 3, stage=0, microbatch=1, peer=1, note="activation"),
        row("send", 3, 4, stage=0, microbatch=1, note="limit"),
        row("send", 4, 8, note="flush"),
    ]
    second = [
        row("step", 0, 10),
        row("receive", 0, 2, stage=1, microbatch=0, peer=0, note="activation"),
        row("forward", 2, 7, stage=1, microbatch=0),
        row("receive", 7, 8, stage=1, microbatch=1, peer=0, note="activation"),
        row("forward", 8, 10, stage=1, microbatch=1),
    ]
    share, _ = breakdown(read_trace(write_run(tmp_path, "pipeline=2", [first, second], microbatches=2)), 0)
    # The last message was wanted at 7 s: until then worker 1 was behind, from then on it was on its way.
    assert share.transfer_s == 0.5 + 0.5 + 1.0
    assert share.wait_s + share.bubble_s == 1.0 + 3.0
    assert share.bubble_s == 4.0, "free links or not, it would wait 6 s for worker 1 to end"


def test_a_step_that_was_not_recorded(tmp_path: Path) -> None:
    trace = read_trace(pipeline_run(tmp_path))
    with pytest.raises(UsageError, match=r"step 7 was not recorded; .* has 0$"):
        breakdown(trace, 7)


def nested(draw: Any, begin: float, end: float, depth: int) -> list[TraceEvent]:
    """Events that are nested or disjoint, inside a span."""
    kinds = ["forward", "backward", "recompute", "optimizer", "collective", "encode", "send", "receive"]
    cuts = sorted(draw(st.lists(st.floats(begin, end), min_size=0, max_size=6)))
    found = []
    for low, high in zip(cuts[::2], cuts[1::2], strict=False):
        kind = draw(st.sampled_from(kinds))
        message = kind in ("send", "receive")
        about = {
            "step": 0,
            "stage": draw(st.integers(0, 1)),
            "microbatch": draw(st.integers(0, 2)),
            "bytes": None,
            "peer": draw(st.integers(0, 1)) if message else None,
            "note": draw(st.sampled_from(["activation", "gradient"])) if message else None,
        }
        found.append(TraceEvent(kind=kind, stream=kind if message else "compute", start_s=low, end_s=high, **about))
        if depth and not message:
            found += nested(draw, low, high, depth - 1)
    return found


@st.composite
def traces(draw: Any) -> Trace:
    """Two workers that did anything at all, one after the other or nested."""
    workers = []
    for rank in range(2):
        begin, end = draw(st.floats(0, 1)), draw(st.floats(1, 9))
        whole = {"stage": None, "microbatch": None, "bytes": None, "peer": None, "note": None}
        step = TraceEvent(step=0, kind="step", stream="compute", start_s=begin, end_s=end, **whole)
        events = [step, *nested(draw, begin, end, 2)]
        ordered = tuple(sorted(events, key=lambda one: (one.start_s, -one.end_s)))
        workers.append(WorkerTrace(rank=rank, host="", clock_error_s=0.0, events=ordered))
    return Trace(run="", mesh=Mesh(pipeline=2), training=True, workers=tuple(workers), num_steps=1)


@given(traces())
@settings(max_examples=150, deadline=None)
def test_the_parts_add_up_whatever_happened(trace: Trace) -> None:
    for share in breakdown(trace, 0):
        assert math.isclose(sum(share.parts().values()), share.step_s, abs_tol=1e-9)
        assert all(seconds >= -1e-9 for seconds in share.parts().values()), share


def test_the_text_timeline_draws_what_the_table_counts(tmp_path: Path) -> None:
    """Worker 1 arrives at the all-reduce 4 s before worker 0: it waits, and the all-reduce takes 1 s on both."""

    def rows(busy_s: float) -> list[dict[str, Any]]:
        return [
            row("step", 0, 10),
            row("backward", 0, busy_s, stage=0, microbatch=0),
            row("collective", 1, 10, stream="collective", note="data"),
            row("collective", busy_s, 9, note="data"),
        ]

    trace = read_trace(write_run(tmp_path, "data=2", [rows(8), rows(4)]))
    shares = breakdown(trace, 0)
    assert [(share.collective_s, share.wait_s, share.overhead_s) for share in shares] == [(1, 0, 1), (1, 4, 1)]
    lines = timeline_text(trace_timeline(trace, 0, "run"), width=106)  # 10 columns are a second
    for line, share in zip(lines, shares, strict=False):
        assert line.plain.count("+") == 10 * share.collective_s
        assert line.plain.count("·") == 10 * (share.wait_s + share.overhead_s)
