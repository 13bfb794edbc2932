"""Reading a run folder while it grows."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stagewright.engine.worker.faults import Doing, Fault
from stagewright.engine.worker.process import ProcessMark
from stagewright.report.live import tail as tail_module
from stagewright.report.live.snapshot import describe_error
from stagewright.report.live.tail import LineTail, RunTail, newest_run
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan


@pytest.fixture(autouse=True)
def _look_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "SLOW_S", 0.0)


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = LineTail(path)
    assert lines.read_new() == []
    with path.open("w") as file:
        for piece, expected in (
            ('{"step": 1}\n{"st', [{"step": 1}]),
            ('ep": 2}', []),
            ("\n", [{"step": 2}]),
            ('{"broken\n[1]\n{"step": 3}\n', [{"step": 3}]),
            ("", []),
        ):
            file.write(piece)
            file.flush()
            assert lines.read_new() == expected
    lines.close()


def test_a_character_that_is_cut_in_two(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = '{"note": "ü"}\n'.encode()
    lines = LineTail(path)
    path.write_bytes(whole[:11])
    assert lines.read_new() == []
    path.write_bytes(whole)
    assert lines.read_new() == [{"note": "ü"}]
    lines.close()


def test_a_long_past_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "_MAX_BYTES", 7)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {n}}}\n' for n in range(20)))
    lines, found = LineTail(path), []
    for _ in range(60):
        found += lines.read_new()
    assert [one["step"] for one in found] == list(range(20))
    lines.close()


def test_a_run_from_begin_to_end(make_run: Callable[..., Any]) -> None:
    run = make_run()
    tail = RunTail(run.path)
    assert tail.poll().status(time.time()) == "starting"
    run.begin("forward", step=0, stage=0, microbatch=3)
    run.line(kind="begin", step=0, total=4, batches=4)
    run.step(1)
    state = tail.poll()
    assert (state.status(time.time()), state.step, state.workers[0].doing.microbatch) == ("running", 1, 3)
    run.begin("optimizer")
    assert tail.poll().workers[0].doing == Doing(count=2, step=0, action="optimizer")
    run.step(2)
    run.folder.finish("done", {"loss": 0.5})
    state = tail.poll()
    assert (state.status(time.time()), state.step) == ("done", 2), "what was written before the result counts"
    tail.close()


def test_the_plan_may_come_later_and_be_replaced(tmp_path: Path, plan: Plan) -> None:
    folder = tmp_path / "run"
    tail = RunTail(folder)
    assert tail.poll().status(time.time()) == "waiting"
    (folder / "workers" / "0").mkdir(parents=True)
    assert tail.poll().status(time.time()) == "waiting"
    RunFolder(folder).write_plan(plan)
    assert tail.poll().status(time.time()) == "starting"
    RunFolder(folder).write_plan(replace(plan, cuts=("vit.layers.1",)))
    state = tail.poll()
    assert state.plan is not None
    assert state.plan.cuts == ("vit.layers.1",)
    tail.close()


def test_a_plan_that_can_t_be_read_is_told(tmp_path: Path, plan: Plan) -> None:
    (tmp_path / "plan.toml").write_text("batch = \n")
    tail = RunTail(tmp_path)
    error = describe_error(tail.poll(), time.time())
    assert error is not None
    assert "plan.toml" in error["text"]
    RunFolder(tmp_path).write_plan(plan)
    assert tail.poll().status(time.time()) == "starting"
    tail.close()


def test_faults_are_found(make_run: Callable[..., Any]) -> None:
    run = make_run()
    tail = RunTail(run.path)
    tail.poll()
    Fault(worker=1, kind="raised", message="E: x").write(run.path / "workers" / "1" / "error.json")
    error = describe_error(tail.poll(), time.time())
    assert error is not None
    assert error["text"] == "worker 1 failed: E: x"
    tail.close()


def test_a_killed_process_is_found_gone(make_run: Callable[..., Any]) -> None:
    """A real process per worker, killed as the system would."""
    run = make_run()
    program = (
        "import sys, time; from pathlib import Path; from stagewright.engine.worker.process import ProcessMark\n"
        "ProcessMark.of_this_process().write(Path(sys.argv[1]) / 'process.json'); print(flush=True); time.sleep(60)"
    )
    workers = [
        subprocess.Popen([sys.executable, "-c", program, run.path / "workers" / str(rank)], stdout=subprocess.PIPE)
        for rank in (0, 1)
    ]
    try:
        for one in workers:
            assert one.stdout is not None
            one.stdout.readline()
        run.begin("forward", worker=0)
        tail = RunTail(run.path)
        assert [one.process for one in tail.poll().workers] == ["running", "running"]
        workers[0].kill()
        workers[0].wait()
        assert [one.process for one in tail.poll().workers] == ["gone", "running"]
        workers[1].kill()
        workers[1].wait()
        state = tail.poll()
        assert state.status(time.time()) == "starting"
        assert state.status(time.time() + 60) == "killed"
        tail.close()
    finally:
        for one in workers:
            one.kill()
            one.communicate()


def test_a_process_elsewhere_is_not_judged(make_run: Callable[..., Any]) -> None:
    run = make_run()
    for rank in (0, 1):
        mark = replace(ProcessMark.of_this_process(), machine="elsewhere", host="node7")
        mark.write(run.path / "workers" / str(rank) / "process.json")
    tail = RunTail(run.path)
    assert [one.process for one in tail.poll().workers] == ["unknown", "unknown"]
    tail.close()


def test_the_newest_run_is_followed(make_run: Callable[..., Any], tmp_path: Path) -> None:
    root = tmp_path / "runs"
    tail = RunTail(root)
    assert tail.poll().status(time.time()) == "waiting"
    first = make_run()
    assert tail.poll().name == first.path.name
    first.step(1)
    tail.poll()
    second = make_run()  # in the same second: …-again1
    state = tail.poll()
    assert (state.name, state.step) == (second.path.name, None)
    assert newest_run(first.path) == first.path
    tail.close()


def test_reading_leaves_no_trace(make_run: Callable[..., Any]) -> None:
    run = make_run()
    run.begin("forward")
    run.step(1)

    def inventory() -> list[tuple[str, int, int]]:
        return sorted((str(one), one.stat().st_size, one.stat().st_mtime_ns) for one in run.path.rglob("*"))

    before, files = inventory(), len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    tail = RunTail(run.path)
    for _ in range(3):
        tail.poll()
    tail.close()
    assert inventory() == before
    if files:
        assert len(os.listdir("/proc/self/fd")) == files


def test_a_line_that_never_ends_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = LineTail(path)
    with path.open("wb") as file:
        for _ in range(12):
            file.write(b"x" * 2**20)
            file.flush()
            assert lines.read_new() == []
        assert len(lines._partial) <= tail_module.MAX_LINE_BYTES
        file.write(b'\n{"step": 1}\n')
        file.flush()
    assert [line for _ in range(4) for line in lines.read_new()] == [{"step": 1}]
    lines.close()


@pytest.mark.parametrize("line", ['{"step": NaN, "seconds": 1}', '{"step": 1, "seconds": NaN}', '{"step": 1e400}'])
def test_values_that_no_run_writes_are_ignored(make_run: Callable[..., Any], line: str) -> None:
    run = make_run()
    run.line(kind="other")
    with (run.path / "workers" / "0" / "metrics.jsonl").open("a") as file:
        file.write(line + '\n{"step": 0, "seconds": 0.5}\n')
    tail = RunTail(run.path)
    tail.poll()
    assert tail.poll().step == 1


def test_a_plan_of_too_many_workers_is_named(make_run: Callable[..., Any]) -> None:
    run = make_run(Plan.of("digits-vit", 99999, "data=99999"))
    assert "data=99999 has more workers than can be followed: at most 4096" in str(RunTail(run.path).poll().damaged)


def test_a_study_is_followed_by_its_newest_run(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text("{}")
    for name in ("2026-11-15-031502-a", "2026-11-15-031503-b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "plan.toml").write_text("")
    assert newest_run(tmp_path) == tmp_path / "runs" / "2026-11-15-031503-b"
