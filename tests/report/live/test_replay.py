"""A finished run, moment by moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stagewright.engine.worker.faults import Fault
from stagewright.report.live.replay import read_replay
from stagewright.report.live.snapshot import snapshot
from stagewright.spec.plan import Plan


def event(step: int, kind: str, start_s: float, end_s: float, **values: Any) -> dict[str, Any]:
    streams = {"send": "send", "receive": "receive"}
    empty = {"stage": None, "microbatch": None, "bytes": None, "peer": None, "note": None}
    times = {"start_s": 100.0 + start_s, "end_s": 100.0 + end_s}
    return {"step": step, "kind": kind, "stream": streams.get(kind, "compute"), **empty, **times, **values}


@pytest.fixture
def recorded(make_run: Callable[..., Any], plan: Plan) -> Any:
    """Two steps of a measurement, 1 s and 2 s, with 10 s between them."""
    run = make_run(replace(plan, task=None, epochs=None, steps=2))
    for worker in (0, 1):
        run.line(worker=worker, step=0, seconds=1.0, loss=2.0, waited_s=0.25)
        run.line(worker=worker, step=1, seconds=2.0, loss=1.0, waited_s=0.25)
        run.folder.worker(worker).write_events(
            [
                event(0, "step", 0.0, 1.0),
                event(0, "receive", 0.1, 0.35, stage=worker, microbatch=0),
                event(0, "send", 0.1, 0.9),
                event(0, "forward", 0.4, 0.8, stage=worker, microbatch=0),
                event(0, "recompute", 0.5, 0.6, stage=worker, microbatch=0),
                event(1, "step", 11.0, 13.0),
                event(1, "backward", 11.5, 12.5, stage=worker, microbatch=3),
            ]
        )
    run.folder.finish("done")
    return run


def doing(state: Any, rank: int = 0) -> tuple[Any, ...]:
    one = state.workers[rank].doing
    return (one.action, one.step, one.stage, one.microbatch)


def test_events_and_lines_on_one_axis(recorded: Any) -> None:
    replay = read_replay(recorded.folder)
    assert replay.length_s == 3.0
    assert doing(replay.state_at(0.05)) == ("", None, None, None)
    assert doing(replay.state_at(0.2), 1) == ("receive", 0, 1, 0)
    assert doing(replay.state_at(0.37)) == ("", 0, None, None)
    assert doing(replay.state_at(0.45)) == ("forward", 0, 0, 0)
    assert doing(replay.state_at(0.55)) == ("recompute", 0, 0, 0), "the innermost one"
    assert doing(replay.state_at(0.7)) == ("forward", 0, 0, 0)
    assert replay.state_at(0.99).step is None
    assert replay.state_at(1.0).step == 1
    assert doing(replay.state_at(1.6), 1) == ("backward", 1, 1, 3), "the pause between the steps is left out"
    assert replay.state_at(2.9).status(0.0) == "running"
    end = replay.state_at(3.0)
    assert (end.status(0.0), end.step, end.loss) == ("done", 2, 1.0)


def test_back_begins_anew(recorded: Any) -> None:
    replay = read_replay(recorded.folder)
    replay.state_at(3.0)
    again = replay.state_at(0.45)
    assert (again.status(0.0), again.step, doing(again)) == ("starting", None, ("forward", 0, 0, 0))
    assert replay.state_at(0.45) is again


def test_without_events_the_metrics_tell(make_run: Callable[..., Any]) -> None:
    run = make_run()
    for worker in (0, 1):
        run.line(worker=worker, kind="begin", step=0, total=2, batches=2)
        run.step(1, worker=worker)
        run.step(2, worker=worker)
        run.line(worker=worker, kind="epoch", epoch=1, step=2, evaluation_s=1.0, accuracy=0.5)
    run.folder.finish("done")
    replay = read_replay(run.folder)
    assert replay.length_s == 2.0
    assert (replay.state_at(0.2).step, doing(replay.state_at(0.2))) == (None, ("step", 0, None, None))
    assert (replay.state_at(0.6).step, doing(replay.state_at(0.6), 1)) == (1, ("step", 1, None, None))
    assert replay.state_at(1.9).epochs == ()
    assert replay.state_at(2.0).epochs[0]["accuracy"] == 0.5


def test_training_s_events_are_of_its_last_steps(make_run: Callable[..., Any]) -> None:
    """Lines count steps that are done, events the steps themselves."""
    run = make_run()
    for worker in (0, 1):
        run.step(1, worker=worker)
        run.step(2, worker=worker)
        rows = [event(1, "step", 7.0, 7.5), event(1, "forward", 7.1, 7.4, stage=worker, microbatch=1)]
        run.folder.worker(worker).write_events(rows)
    run.folder.finish("done")
    replay = read_replay(run.folder)
    assert doing(replay.state_at(0.2)) == ("step", 0, None, None)
    assert doing(replay.state_at(0.7)) == ("forward", 1, 0, 1)


def test_a_broken_run_breaks_at_its_end(make_run: Callable[..., Any]) -> None:
    run = make_run()
    run.step(1)
    Fault(worker=1, kind="raised", message="E: x").write(run.path / "workers" / "1" / "error.json")
    run.folder.finish("failed", {"error": "worker 1 failed"})
    replay = read_replay(run.folder)
    assert replay.state_at(0.4).status(0.0) == "starting"
    assert replay.state_at(0.5).status(0.0) == "failed"
    assert snapshot(replay.state_at(0.5), 0.5)["workers"][1]["condition"] == "broken"


def test_a_run_without_a_single_line(make_run: Callable[..., Any]) -> None:
    run = make_run()
    run.folder.finish("failed", {"error": "E"})
    replay = read_replay(run.folder)
    assert replay.length_s == 0.0
    assert replay.state_at(0.0).status(0.0) == "failed"
