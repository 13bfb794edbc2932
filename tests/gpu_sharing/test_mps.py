"""How an MPS daemon is started and stopped, with a program in its place that records its commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stagewright.cluster.device import Device, are_separate, check_devices, num_separate
from stagewright.errors import RunError, UsageError
from stagewright.gpu_sharing import mps

CONTROL = """#!/bin/sh
if [ "$1" = -d ]; then echo started >> {log}; [ -z "$FAIL_MPS" ] || {{ echo "no permission" >&2; exit 1; }}; exit 0; fi
read line; echo "$line $CUDA_MPS_PIPE_DIRECTORY" >> {log}
"""
START = "from stagewright.gpu_sharing import mps; import os, time; mps.start_daemon('cuda:0/8'); "


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    control, log = tmp_path / "bin" / "nvidia-cuda-mps-control", tmp_path / "log.txt"
    control.parent.mkdir()
    control.write_text(CONTROL.format(log=log))
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{control.parent}:{os.environ['PATH']}")
    for variable in (mps.PIPE_FOLDER, "RANK"):
        monkeypatch.delenv(variable, raising=False)
    return log


def _wait_for_quit(log: Path) -> list[str]:
    until = time.monotonic() + 20
    while "quit" not in log.read_text() and time.monotonic() < until:
        time.sleep(0.02)
    return log.read_text().splitlines()


@pytest.mark.parametrize("ending", ["pass", "os.kill(os.getpid(), 9)"])
def test_daemon_ends_with_its_process(log: Path, ending: str) -> None:
    subprocess.run([sys.executable, "-c", START + f"print(os.environ[mps.PIPE_FOLDER]); {ending}"], check=False)
    lines = _wait_for_quit(log)
    assert lines[0] == "started"
    folder = Path(lines[1].removeprefix("quit "))
    assert folder.name.startswith("stagewright-mps-")
    for _ in range(500):
        if not folder.exists():
            break
        time.sleep(0.02)
    assert not folder.exists()


def test_daemon_that_does_not_start_is_refused_with_its_words(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL_MPS", "1")
    with pytest.raises(
        UsageError, match=r"cuda:0/8: CUDA MPS did not start \(no permission\); use the whole GPU, cuda:0"
    ):
        mps.start_daemon("cuda:0/8")
    assert mps.PIPE_FOLDER not in os.environ


def test_daemon_of_the_user_is_used_and_left_alone(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(mps.PIPE_FOLDER, "/somewhere")
    mps.start_daemon("cuda:0/8")
    assert not log.exists()


def test_machine_without_mps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(mps.PIPE_FOLDER, raising=False)
    with pytest.raises(UsageError, match="nvidia-cuda-mps-control is not installed"):
        mps.start_daemon("cuda:0/8")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="before torchrun"):
        mps.start_daemon("cuda:0/8")


def test_share_that_mps_does_not_keep_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEWRIGHT_GPU_SHARE", "8 132")
    mps.check_share("cuda:0/8", 16)
    with pytest.raises(RunError, match="132 of the GPU's 132 SMs instead of 16"):
        mps.check_share("cuda:0/8", 132)


def test_shares_are_parsed_and_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Device.parse("cuda:1/8") == Device(text="cuda:1/8", kind="cuda", index=1, share=8)
    for text in ("cuda:0/0", "cuda:0/65", "cuda:0/", "cuda/8", "cuda:0/-1", "cpu:0/2"):
        with pytest.raises(UsageError):
            Device.parse(text)
    assert are_separate(["cuda:0/8", "cuda:0/8"])
    assert not are_separate(["cuda:0", "cuda:0"])
    assert num_separate(["cuda:0/8", "cuda:0/8", "cuda:0/8"]) == 3
    assert num_separate(["cpu:0", "cpu:1", "cpu:0"]) == 2
    monkeypatch.setattr(Device, "_check_present", lambda self: None)
    with pytest.raises(UsageError, match="cuda:0/2, cuda:0/2, cuda:0/8, which is more than all of cuda:0"):
        check_devices(["cuda:0/2", "cuda:0/2", "cuda:0/8"])


def test_signals_of_the_terminal_do_not_reach_the_guard(log: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", START + "time.sleep(60)"], start_new_session=True, stderr=subprocess.DEVNULL
    )
    while not log.exists():
        time.sleep(0.02)
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    process.wait()
    assert _wait_for_quit(log)[1].startswith("quit ")
