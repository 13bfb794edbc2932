from __future__ import annotations

import builtins
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stagewright.runs import RunFolder
from stagewright.spec import ModelSpec, Plan

PLAN = Plan(model=ModelSpec(name="mlp-mnist"), batch=8)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, PLAN, environment={})


def test_metrics_are_there_at_once(folder: RunFolder) -> None:
    with folder.worker(3) as worker:
        for step in range(3):
            worker.append_metrics(step=step, loss=0.5**step, note="a\nb")
            assert len(list(folder.metrics(3))) == step + 1
    assert [line["loss"] for line in folder.metrics(3)] == [1.0, 0.5, 0.25]
    assert next(folder.metrics(3))["note"] == "a\nb"
    assert folder.workers() == (3,)
    assert list(folder.metrics(0)) == []


def test_workers_in_order(folder: RunFolder) -> None:
    for rank in (10, 2, 0):
        with folder.worker(rank) as worker:
            worker.append_metrics(step=0)
    assert folder.workers() == (0, 2, 10)


def test_half_a_line_is_left_out_and_closed_by_the_next_writer(folder: RunFolder) -> None:
    with folder.worker(0) as worker:
        worker.append_metrics(step=0)
    with open(folder.path / "workers" / "0" / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "lo')
    assert [line["step"] for line in folder.metrics(0)] == [0]
    with folder.worker(0) as worker:
        worker.append_metrics(step=2)
    assert [line["step"] for line in folder.metrics(0)] == [0, 2]


def test_a_killed_worker_leaves_every_step(folder: RunFolder) -> None:
    code = (
        "import os, signal, sys\n"
        "from stagewright.runs import RunFolder\n"
        "worker = RunFolder.open(sys.argv[1]).worker(0)\n"
        "for step in range(5): worker.append_metrics(step=step)\n"
        "assert 'torch' not in sys.modules and 'pyarrow' not in sys.modules\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder.path)], timeout=60, check=False, env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    assert [line["step"] for line in folder.metrics(0)] == [0, 1, 2, 3, 4]


EVENTS = [
    {"kind": "F", "stage": 0, "microbatch": 0, "start_s": 0.0, "end_s": 0.5},
    {"kind": "send", "stage": 0, "microbatch": 0, "start_s": 0.5, "end_s": 0.75, "num_bytes": 2**40},
]


def test_events(folder: RunFolder) -> None:
    assert folder.worker(1).events() == []
    path = folder.worker(1).write_events(EVENTS)
    assert path.name == "events.parquet"
    assert folder.worker(1).events() == [{**EVENTS[0], "num_bytes": None}, EVENTS[1]]
    folder.worker(1).write_events([])
    assert folder.worker(1).events() == []
    assert [one.name for one in path.parent.iterdir()] == ["events.parquet"]


def test_events_without_pyarrow(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name.partition(".")[0] == "pyarrow":
            raise ModuleNotFoundError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert folder.worker(1).write_events(EVENTS).name == "events.jsonl"
    assert folder.worker(1).events() == EVENTS
