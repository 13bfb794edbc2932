"""The file for Perfetto: a track a worker and stream, strictly nested, with an arrow for each message."""

from __future__ import annotations

import json
from pathlib import Path

from nesting import crossing

from runs import pipeline_run
from stagewright.simulator.export.chrome import save_chrome_trace
from stagewright.trace.perfetto import perfetto_events
from stagewright.trace.read import read_trace


def test_tracks_events_and_arrows(tmp_path: Path) -> None:
    trace = read_trace(pipeline_run(tmp_path))
    save_chrome_trace(perfetto_events(trace), tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    names = {(one["pid"], one["args"]["name"]) for one in events if one["name"] == "process_name"}
    assert names == {(0, "worker 0, stage 0 on host0"), (1, "worker 1, stage 1 on host1")}
    tracks = [one["args"]["name"] for one in events if one["name"] == "thread_name" and one["pid"] == 0]
    assert tracks == ["compute", "send", "receive", "collective"]
    assert sum(one["ph"] == "X" for one in events) == sum(len(worker.events) for worker in trace.workers)
    assert crossing(events) == []
    begun = {one["id"]: one for one in events if one["ph"] == "s"}
    ended = {one["id"]: one for one in events if one["ph"] == "f"}
    assert len(begun) == len(ended) == 4
    for number, begin in begun.items():
        assert begin["pid"] != ended[number]["pid"]
    first = min(ended.values(), key=lambda one: one["ts"])
    assert begun[first["id"]]["ts"] == 1e6, "activation 0 left worker 0 at 1 s"
    forward = next(one for one in events if one["name"] == "forward 0" and one["pid"] == 1)
    assert (forward["ts"], forward["dur"]) == (1.25e6, 1e6)
    assert forward["args"] == {"step": 0, "stage": 1, "microbatch": 0}


def test_one_step_alone(tmp_path: Path) -> None:
    trace = read_trace(pipeline_run(tmp_path))
    assert not [one for one in perfetto_events(trace, [3]) if one["ph"] == "X"]


def test_what_crosses_is_found() -> None:
    event = {"ph": "X", "pid": 0, "tid": 0, "name": "a", "ts": 0.0, "dur": 2.0}
    assert crossing([event, {**event, "name": "b", "ts": 1.0, "dur": 1.0}]) == []
    assert crossing([event, {**event, "name": "b", "ts": 1.0, "dur": 1.001}]) == [("a", "b")]
