"""Events of a run folder, read on one clock; what is not there is said in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runs import pipeline_rows, pipeline_run, row, write_run
from stagewright.errors import UsageError
from stagewright.report.timeline import trace_timeline
from stagewright.runs import RunFolder
from stagewright.runs.journal import Journal, RecordedStep
from stagewright.trace.breakdown import breakdown
from stagewright.trace.read import read_trace


def test_times_are_on_worker_0s_clock_and_begin_with_the_first_step(tmp_path: Path) -> None:
    folder = pipeline_run(tmp_path)
    raw = folder.worker(1).events()[0]
    assert raw["start_s"] == 100.5 - 7, "worker 1's own clock is 7 s behind"
    trace = read_trace(folder)
    assert [worker.host for worker in trace.workers] == ["host0", "host1"]
    assert [worker.clock_error_s for worker in trace.workers] == [0.0, 1e-4]
    assert trace.spans == {0: (0.0, 12.0)}
    assert trace.workers[1].step(0) is not None
    forwards = [(one.start_s, one.end_s) for one in trace.workers[1].events if one.kind == "forward"]
    assert forwards == [(1.25, 2.25), (4.5, 5.5)]
    assert [worker.stages for worker in trace.workers] == [(0,), (1,)]


def test_an_event_around_others_comes_first(tmp_path: Path) -> None:
    rows = [row("recompute", 1, 2), row("backward", 1, 3), row("step", 0, 4)]
    (worker,) = read_trace(write_run(tmp_path, "serial", [rows])).workers
    assert [one.kind for one in worker.events] == ["step", "backward", "recompute"]


def test_the_median_step(tmp_path: Path) -> None:
    rows = [{**row("step", 10 * number, 10 * number + took), "step": number} for number, took in enumerate((3, 9, 4))]
    trace = read_trace(write_run(tmp_path, "serial", [rows]))
    assert trace.steps == (0, 1, 2)
    assert trace.num_steps == 3
    assert trace.median_step == 2


def test_only_steps_that_every_worker_has_count(tmp_path: Path) -> None:
    later = [{**one, "step": 1} for one in pipeline_rows()[0]]
    trace = read_trace(write_run(tmp_path, "data=2", [pipeline_rows()[0] + later, later]))
    assert trace.steps == (1,)


def test_a_run_without_events(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "serial", [pipeline_rows()[0]])
    (folder.worker(0).path / "events.parquet").unlink()
    with pytest.raises(UsageError, match=r"has no events of worker 0; run its plan again: torchrun --nproc-per-node 1"):
        read_trace(folder)
    folder.finish("failed", {})
    with pytest.raises(UsageError, match="the run failed before one of its recorded steps had ended"):
        read_trace(folder)
    (folder.path / "result.json").unlink()
    with pytest.raises(UsageError, match="has no events of worker 0 yet: no step that is recorded has ended"):
        read_trace(folder)


def broken_run(root: Path) -> RunFolder:
    """A second step that a fault of worker 1 ended at 20 s, while worker 0 waited for it."""
    first, second = pipeline_rows()
    first += [
        {**row("step", 12, 20, note="unfinished"), "step": 1},
        {**row("forward", 12, 13, stage=0, microbatch=0), "step": 1},
        {**row("receive", 13, 20, stage=0, microbatch=0, note="unfinished"), "step": 1},
    ]
    second += [
        {**row("step", 12, 20, note="unfinished"), "step": 1},
        {**row("forward", 14, 20, stage=1, microbatch=0, note="unfinished"), "step": 1},
    ]
    folder = write_run(root, "pipeline=2", [first, second], microbatches=2, cuts=("fc1",))
    folder.finish("failed", {"error": "worker 1 failed"})
    return folder


def test_a_run_that_failed(tmp_path: Path) -> None:
    """Whole steps for those who want to measure, the step of the fault for those who want to see it."""
    folder = broken_run(tmp_path)
    assert read_trace(folder).steps == (0,)
    trace = read_trace(folder, unfinished=True)
    assert (trace.steps, trace.unfinished_step, trace.median_step) == ((0, 1), 1, 0)
    assert trace.spans[1] == (12.0, 20.0)
    shares = breakdown(trace, 1)
    assert [(one.step_s, one.compute_s, one.wait_s + one.bubble_s) for one in shares] == [(8, 1, 7), (8, 6, 0)]
    timeline = trace_timeline(trace, 1, "it")
    assert timeline.caption == "step 1 (unfinished): 8.00 s"
    assert [bar.name for bar in timeline.bars if bar.lane == 1] == ["F"]


def test_a_failed_run_whose_worker_was_killed(tmp_path: Path) -> None:
    folder = broken_run(tmp_path)
    (folder.worker(1).path / "events.parquet").unlink()
    with pytest.raises(UsageError, match="of worker 1: the run failed before one of its recorded steps had ended"):
        read_trace(folder)
    trace = read_trace(folder, unfinished=True)
    assert [worker.rank for worker in trace.workers] == [0]
    assert breakdown(trace, 1)[0].step_s == 8
    (folder.worker(0).path / "events.parquet").unlink()
    with pytest.raises(UsageError, match="of worker 0: the run failed before one of its recorded steps had ended"):
        read_trace(folder, unfinished=True)


def test_a_worker_that_was_killed_after_a_whole_step(tmp_path: Path) -> None:
    """It is in that step, and not in the one of the fault, of which the other one tells alone."""
    folder = broken_run(tmp_path)
    (folder.worker(1).path / "events.parquet").unlink()
    journal = Journal(folder.worker(1).path)
    names = ("kind", "stream", "stage", "microbatch", "start_s", "end_s", "bytes", "peer", "note")
    whole, *rows = pipeline_rows()[1]
    events: list[Any] = [tuple(one[name] for name in names) for one in rows]
    begin_s, end_s = whole["start_s"], whole["end_s"]
    journal.append(RecordedStep(step=0, note=None, begin_s=begin_s, end_s=end_s, events=events))
    journal.close()
    assert read_trace(folder).steps == (0,)
    trace = read_trace(folder, unfinished=True)
    assert (trace.steps, trace.num_steps, trace.unfinished_step) == ((0, 1), 2, 1)
    assert [share.worker for share in breakdown(trace, 0)] == [0, 1]
    assert [(share.worker, share.step_s) for share in breakdown(trace, 1)] == [(0, 8)]
    assert trace_timeline(trace, 1, "it").lanes == ("worker 0", "worker 1")


def test_events_of_an_older_version(tmp_path: Path) -> None:
    old = {"name": "F", "stage": 0, "microbatch": 0, "start_s": 0.0, "end_s": 1.0}
    folder = write_run(tmp_path, "serial", [[old]])
    with pytest.raises(UsageError, match="written by an older version, without kinds; run its plan again"):
        read_trace(folder)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "nap"}, "unknown kind 'nap'"),
        ({"stream": "gossip"}, "unknown stream 'gossip'"),
        ({"end_s": 1.0}, r"ends at 1.0 s, before it begins at 100.0 s"),
    ],
)
def test_events_that_make_no_sense(wrong: dict[str, object], message: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path, "serial", [[{**row("step", 0, 1), **wrong}]])
    with pytest.raises(UsageError, match=message):
        read_trace(folder)


def test_events_without_a_step(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no complete step"):
        read_trace(write_run(tmp_path, "serial", [[row("forward", 0, 1)]]))
    with pytest.raises(UsageError, match="no step that all workers completed"):
        read_trace(write_run(tmp_path, "data=2", [[row("step", 0, 1)], [{**row("step", 0, 1), "step": 3}]]))


def test_a_clock_that_is_no_json(tmp_path: Path) -> None:
    folder = pipeline_run(tmp_path)
    (folder.worker(1).path / "clock.json").write_text("[1, 2]")
    with pytest.raises(UsageError, match=r"clock.json must hold a JSON object, not a list"):
        read_trace(folder)


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    folder = pipeline_run(tmp_path)
    code = (
        "import json, sys\n"
        "from stagewright.runs import RunFolder\n"
        "from stagewright.trace.breakdown import breakdown\n"
        "from stagewright.trace.read import read_trace\n"
        "trace = read_trace(RunFolder.open(sys.argv[1]))\n"
        "print(json.dumps([share.bubble_s for share in breakdown(trace, 0)]))\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code, folder.path], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [2.75, 2.75]


def test_without_pyarrow_events_are_lines(tmp_path: Path) -> None:
    folder = RunFolder.open(pipeline_run(tmp_path).path)
    for rank in range(2):
        rows = folder.worker(rank).events()
        (folder.worker(rank).path / "events.parquet").unlink()
        text = "".join(json.dumps(one) + "\n" for one in rows)
        (folder.worker(rank).path / "events.jsonl").write_text(text)
    assert read_trace(folder).spans == {0: (0.0, 12.0)}
