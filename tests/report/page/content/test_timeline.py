from __future__ import annotations

from pathlib import Path

from made_runs import make_run
from stagewright.report.page.content.timeline import make_timeline, shown_steps
from stagewright.trace.read import read_trace


def test_columns_say_what_the_events_say(tmp_path: Path) -> None:
    trace = read_trace(make_run(tmp_path, "pipeline=2", steps=2))
    data = make_timeline(trace, name="x", title="x").data
    assert [step[0] for step in data["steps"]] == [0, 1]
    assert data["steps"][0][1] == 0
    for worker, shown in zip(trace.workers, data["workers"], strict=True):
        compute = next(lane for lane in shown["lanes"] if lane["stream"] == "compute")
        events = [one for one in worker.events if one.stream == "compute" and one.kind != "step"]
        begins, at = [], 0
        for gap in compute["begin"]:
            at += gap
            begins.append(at)
        assert begins == [round(one.start_s * 1e6) for one in events]
        ends = [begin + length for begin, length in zip(begins, compute["length"], strict=True)]
        assert ends == [round(one.end_s * 1e6) for one in events]
        assert [data["kinds"][kind] for kind in compute["kind"]] == [one.kind for one in events]
        assert compute["bytes"] == -1
        sends = next(lane for lane in shown["lanes"] if lane["stream"] == "send")
        assert sends["bytes"] == 65536
        assert sends["peer"] == 1 - worker.rank
    assert data["notes"] == ["activation", "gradient"]


def test_as_many_whole_steps_as_fit_are_shown(tmp_path: Path) -> None:
    trace = read_trace(make_run(tmp_path, "pipeline=2", steps=5))
    each = sum(len(worker.of_step(0)) + 1 for worker in trace.workers)
    assert shown_steps(trace, 5 * each) == (0, 1, 2, 3, 4)
    assert shown_steps(trace, 3 * each) == (0, 1, 2)
    assert shown_steps(trace, 1) == (0,)
    timeline = make_timeline(trace, name="x", title="x", max_events=3 * each)
    assert "Only the first 3 of 5 recorded steps" in timeline.note
    assert make_timeline(trace, name="x", title="x").note == ""
