"""A real run, traced as a person would: what its workers recorded, and the verb on it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from nesting import crossing

from program import run_program
from runs import pipeline_run
from stagewright.runs.run_folder import RunFolder
from stagewright.trace.breakdown import breakdown
from stagewright.trace.memory import read_memory
from stagewright.trace.perfetto import perfetto_events
from stagewright.trace.read import read_trace


def test_what_workers_record(real_run: Path) -> None:
    trace = read_trace(RunFolder.open(real_run))
    assert trace.steps == (0, 1)
    assert [worker.stages for worker in trace.workers] == [(0,), (1,)]
    for worker in trace.workers:
        for step in trace.steps:
            whole = worker.step(step)
            assert whole is not None
            own = worker.of_step(step)
            assert all(whole.start_s <= one.start_s <= one.end_s <= whole.end_s for one in own)
            count = {kind: sum(one.kind == kind for one in own) for kind in {one.kind for one in own}}
            assert count == {
                "forward": 3 if worker.rank == 0 else 6,  # and the losses
                "backward": 3,
                "recompute": 3,
                "send": 3 if worker.rank == 0 else 4,  # and waiting until the last gradients have left
                "receive": 3,
                "encode": 3,
                "decode": 3,
                "optimizer": 1,
                "collective": 1,
            }
            sent = [one for one in own if one.kind == "send" and one.peer is not None]
            assert {one.microbatch for one in sent} == {0, 1, 2}
            assert {one.peer for one in sent} == {1 - worker.rank}
            coded = [one.bytes for one in own if one.kind == "encode"]
            assert [one.bytes for one in sent] == coded, "what was encoded is what travels"
    assert crossing(perfetto_events(trace)) == []


def test_messages_are_not_there_before_they_are_sent(real_run: Path) -> None:
    trace = read_trace(RunFolder.open(real_run))
    first, second = (worker.of_step(1) for worker in trace.workers)
    for microbatch in range(3):
        (sent,) = [one for one in first if one.kind == "send" and one.microbatch == microbatch]
        (received,) = [one for one in second if one.kind == "receive" and one.microbatch == microbatch]
        assert received.end_s >= sent.start_s


def test_parts_add_up_to_the_step(real_run: Path) -> None:
    trace = read_trace(RunFolder.open(real_run))
    measured = [line["seconds"] for line in RunFolder.open(real_run).metrics(0)]
    around = []
    for step in trace.steps:
        for share in breakdown(trace, step):
            assert math.isclose(sum(share.parts().values()), share.step_s, abs_tol=1e-12)
            assert all(seconds >= 0 for seconds in share.parts().values()), share
            assert 0 < share.recompute_s < share.compute_s
        around.append(measured[step] - breakdown(trace, step)[0].step_s)
    # What was measured holds the recorded step and its line on the disk; a busy machine may hold up one or another.
    assert 0 <= min(around) < 5e-3


def test_memory_over_the_step(real_run: Path) -> None:
    folder = RunFolder.open(real_run)
    result = folder.result()
    assert result is not None
    for worker, peak in zip(read_memory(folder), result.memory, strict=True):
        assert {one.doing.split()[0] for one in worker.moments} >= {"forward", "backward", "optimizer", "between"}
        assert worker.peak.parameters == peak.parameters
        assert worker.peak.total_bytes == peak.total_bytes, "the peak that the run itself reports"
        assert worker.moments[-1].activations == 0


def trace(*words: str | Path, cwd: Path) -> Any:
    return run_program(["trace", *words], cwd=cwd)


def test_the_verb(real_run: Path, tmp_path: Path) -> None:
    words = ["--show-memory", "--step", "1", "--plot", "memory.svg", "--perfetto", "run.json"]
    done = trace(real_run, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "digits-vit: pipeline on 2 workers, 1f1b, 3 micro-batches: step 1:" in done.stdout
    for name in ("compute", "transfer", "collective", "wait", "bubble", "overhead", "digits: micro-batch"):
        assert name in done.stdout
    assert "peaks at" in done.stdout
    assert "activations" in (tmp_path / "memory.svg").read_text()
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert {one["args"]["step"] for one in events if one["ph"] == "X"} == {1}
    done = trace(real_run, "--json", "--plot", "step.svg", cwd=tmp_path)
    assert done.returncode == 0, (done.returncode, done.stderr)
    content = json.loads(done.stdout)
    assert content["steps"] == [0, 1]
    for one in content["workers"]:
        parts = [one[f"{name}_s"] for name in ("compute", "transfer", "collective", "wait", "bubble", "overhead")]
        assert math.isclose(sum(parts), one["step_s"], abs_tol=1e-12)
    assert {one["worker"] for one in content["events"]} == {0, 1}
    drawn = (tmp_path / "step.svg").read_text()
    assert "worker 1" in drawn
    assert "recompute" in drawn


def test_operators_and_what_makes_two_workers_differ(real_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(real_run, copy)
    words = ["--operators", "--compare-workers", "0", "1", "--perfetto", "operators.json", "--json"]
    done = trace("run", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["comparison"]
    assert not found["is_same"]
    assert "because they hold different stages: worker 0 has stage 0 (from the inputs up to" in found["sentence"]
    assert "only the first has" in found["sentence"]
    assert "aten::conv2d" in found["sentence"]
    events = json.loads((tmp_path / "operators.json").read_text())["traceEvents"]
    assert crossing(events) == []
    operators = [one for one in events if one["ph"] == "X" and one["cat"] == "operator"]
    actions = [one for one in events if one["ph"] == "X" and one["cat"] == "action"]
    assert len(operators) > 200
    inside = [
        one
        for one in operators
        for action in actions
        if one["pid"] == action["pid"]
        and one["name"] == "aten::linear"
        and action["name"].startswith(("forward", "backward"))
        and action["ts"] <= one["ts"] < action["ts"] + action["dur"]
    ]
    assert len(inside) == sum(one["name"] == "aten::linear" for one in operators), "each lies below an action"
    again = trace("run", "--compare-workers", cwd=tmp_path)
    assert "running the plan" not in again.stderr, "what was recorded is used again"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "unknown run 'nowhere'"),
        (["{run}", "--step", "9"], "step 9 was not recorded"),
        (["{run}", "--plot", "step.bmp"], "its suffix is '.bmp'"),
        (["{run}", "--perfetto", "no/such/folder.json"], "there is no folder no/such; create it first"),
        (["{run}", "0", "1"], "workers 0 1 are for --compare-workers; add it, or leave them out"),
        (["{run}", "--compare-workers", "0"], "--compare-workers compares two workers, not 1"),
        (["{run}", "--compare-workers", "0", "2"], "there is no worker 2; the run has workers 0 to 1"),
        (["{run}", "--compare-workers", "1", "1"], "worker 1 can't be compared with itself"),
        (["{run}", "--show-memory"], "has no memory of worker 0 over time"),
    ],
)
def test_what_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    folder = pipeline_run(tmp_path)
    done = trace(*(word.replace("{run}", str(folder.path)) for word in words), cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("stagewright: ")
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
