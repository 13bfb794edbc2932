"""Which process a worker is, and what has become of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stagewright.engine.worker.process import ProcessMark

PROGRAM = (
    "import sys, time; from pathlib import Path; from stagewright.engine.worker.process import ProcessMark\n"
    "ProcessMark.of_this_process().write(Path(sys.argv[1])); print(flush=True); time.sleep(600)"
)


def test_of_this_process(tmp_path: Path) -> None:
    mark = ProcessMark.of_this_process()
    assert mark.pid == os.getpid()
    assert mark.state() == "running"
    mark.write(tmp_path / "deep" / "process.json")
    assert ProcessMark.read(tmp_path / "deep" / "process.json") == mark
    assert ProcessMark.read(tmp_path / "none.json") is None
    (tmp_path / "half.json").write_text('{"pid": 1')
    assert ProcessMark.read(tmp_path / "half.json") is None


def test_a_number_that_is_used_again_is_another_process() -> None:
    own = ProcessMark.of_this_process()
    if not own.started:
        pytest.skip("this system does not tell when a process was started")
    assert replace(own, started="1").state() == "gone"


def test_another_machine_is_not_judged() -> None:
    own = ProcessMark.of_this_process()
    assert replace(own, machine="other", host="other").state() == "unknown"
    assert replace(own, machine=own.machine + "x").state() == "unknown", "another container"


def test_a_machine_that_was_restarted_has_lost_it() -> None:
    assert replace(ProcessMark.of_this_process(), machine="an-earlier-boot pid:[1]").state() == "gone"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_stopped_and_killed(tmp_path: Path) -> None:
    path = tmp_path / "process.json"
    with subprocess.Popen([sys.executable, "-c", PROGRAM, path], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            mark = ProcessMark.read(path)
            assert mark is not None
            assert mark.state() == "running"
            process.send_signal(signal.SIGSTOP)
            until = time.monotonic() + 60
            while mark.state() != "stopped" and time.monotonic() < until:
                time.sleep(0.01)
            assert mark.state() == "stopped"
            process.kill()
            while mark.state() != "gone" and time.monotonic() < until:
                time.sleep(0.01)
            assert mark.state() == "gone", "also before its parent has asked for it"
        finally:
            process.kill()
