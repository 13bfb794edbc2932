"""A worker that raises, dies, stops or hangs ends the run: soon, wholly, and with one message."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagewright.cluster.device import usable_cores
from stagewright.engine.launch.launcher import launch
from stagewright.engine.worker.faults import Fault, read_doing
from stagewright.errors import RunError, StagewrightError, UsageError
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Mesh, ModelSpec, Plan
from stagewright.trace.breakdown import breakdown
from stagewright.trace.read import read_trace

CORES = sorted(usable_cores())
HANG_S = 3.0
END_S = 45.0  # all processes are gone so soon after a fault, on a machine that may itself stand still for a while
STILL = r"no worker has made progress for \d+ s"

SCRIPT = """
import sys
from pathlib import Path
from stagewright.engine.launch.launcher import launch
from stagewright.errors import StagewrightError
from stagewright.runs.run_folder import RunFolder
folder = RunFolder.open(sys.argv[1])
try:
    launch(folder.plan(), folder, job=sys.argv[2], hang_s=100, timeout_s=200)
except StagewrightError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Jobs are found, and no test of this file runs for more than four minutes."""

    def too_long(number: int, frame: Any) -> None:
        raise AssertionError("the test ran for 240 s")

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "support"))
    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(240)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


PLAN = Plan(
    model=ModelSpec(name="mlp"),
    batch=4,
    mesh=Mesh(pipeline=2),
    microbatches=4,
    devices=(f"cpu:{CORES[0]}", f"cpu:{CORES[-1]}"),
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    run.write_plan(PLAN)
    return run


def seen(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads((folder.path / "workers" / str(worker) / "seen.json").read_text()) for worker in (0, 1)]


def wait_until_seen(folder: RunFolder, process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Both workers are at work."""
    until_s = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < until_s:
        with contextlib.suppress(FileNotFoundError, ValueError):
            found = seen(folder)
            counts = [read_doing(folder.path / "workers" / str(worker) / "activity.txt").count for worker in (0, 1)]
            if min(counts) > 6:
                return found
        time.sleep(0.05)
    raise AssertionError("the workers did not come up")


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def nothing_left(notes: list[dict[str, Any]]) -> None:
    """No worker, no child of a worker, no port."""
    pids = [note[name] for note in notes for name in ("pid", "child") if name in note]
    until_s = time.monotonic() + END_S  # who was killed still needs a core to end on
    while any(alive(pid) for pid in pids) and time.monotonic() < until_s:
        time.sleep(0.02)
    assert [pid for pid in pids if alive(pid)] == []
    for port in {note["port"] for note in notes if "port" in note}:
        with socket.socket() as probe:
            probe.bind(("127.0.0.2", 0))  # from the same address, a free port may be connected to itself
            assert probe.connect_ex(("127.0.0.1", port)) != 0


def fails(folder: RunFolder, job: str, hang_s: float = 100.0) -> tuple[StagewrightError, float]:
    """The error of a run, and the time from the last sign of the worker that failed to the end."""
    with pytest.raises(StagewrightError) as caught:
        launch(folder.plan(), folder, job=f"tiny_jobs:{job}", hang_s=hang_s, timeout_s=200)
    last = max(path.stat().st_mtime for path in (folder.path / "workers").glob("*/seen.json"))
    took_s = time.time() - last
    nothing_left(seen(folder))
    return caught.value, took_s


AT = "at: step 3, stage 1, micro-batch 2, forward, shapes (4, 3) float32"


def test_a_worker_that_raises(folder: RunFolder) -> None:
    error, took_s = fails(folder, "raises")
    lines = str(error).splitlines()
    assert isinstance(error, RunError)
    assert error.exit_code == 1
    assert lines[0] == f"worker 1 (cpu:{CORES[-1]}) failed: ValueError: boom in the middle"
    assert lines[1].strip() == AT
    assert lines[2].strip() == f"log: {folder.path}/workers/1/log.txt"
    assert lines[3] == "Traceback (most recent call last):"
    assert "tiny_jobs.py" in lines[4]
    assert 'raise ValueError("boom in the middle")' in str(error)
    assert took_s < END_S
    kept = Fault.read(folder.path / "fault.json")
    assert kept is not None
    assert (kept.worker, kept.kind, kept.doing.microbatch, kept.doing.count) == (1, "raised", 2, 7)
    assert Fault.read(folder.path / "workers" / "1" / "error.json") == kept


def test_a_worker_that_is_killed(folder: RunFolder) -> None:
    error, took_s = fails(folder, "killed")
    lines = str(error).splitlines()
    assert lines[0].startswith(f"worker 1 (cpu:{CORES[-1]}) was killed: SIGKILL")
    assert lines[1].strip() == AT
    assert took_s < END_S


def test_a_worker_that_leaves_without_a_word(folder: RunFolder) -> None:
    error, took_s = fails(folder, "exits")
    assert str(error).splitlines()[0] == f"worker 1 (cpu:{CORES[-1]}) ended: exit code 7"
    assert AT in str(error)
    assert str(error).endswith("last words")
    assert took_s < END_S


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("calls_sys_exit", "ended: its code called sys.exit(0) before the job was done"),
        ("exits_with_zero", "ended: exit code 0 before its job was done"),
    ],
)
def test_a_worker_that_leaves_as_if_it_were_done(folder: RunFolder, job: str, words: str) -> None:
    error, took_s = fails(folder, job)
    assert str(error).splitlines()[0] == f"worker 1 (cpu:{CORES[-1]}) {words}"
    assert AT in str(error)
    assert took_s < END_S


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
def test_a_full_disk(folder: RunFolder) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", folder.path], capture_output=True)
    if mounted.returncode:
        pytest.skip("can't mount a small disk here")
    try:
        folder.write_plan(PLAN)
        with pytest.raises(RunError) as caught:
            launch(PLAN, folder, job="tiny_jobs:fills_the_disk", hang_s=100, timeout_s=200)
    finally:
        subprocess.run(["umount", "-l", folder.path], check=True)
    assert str(caught.value).startswith(f"worker 1 (cpu:{CORES[-1]}) failed: can't write ")
    assert "No space left on device" in str(caught.value).splitlines()[0]
    assert caught.value.exit_code == 1


def test_a_run_folder_that_is_deleted(folder: RunFolder) -> None:
    with launcher(folder, "goes_on") as process:
        notes = wait_until_seen(folder, process)
        shutil.rmtree(folder.path)
        _, err = process.communicate(timeout=END_S)
    assert process.returncode == 1
    assert f"the run failed: its folder {folder.path} was deleted or moved" in err
    nothing_left(notes)


def test_a_worker_that_writes_to_a_deleted_folder(folder: RunFolder) -> None:
    """The reason is the folder, not the first worker that writes to it."""
    with pytest.raises(RunError, match=r"^the run failed: its folder .* was deleted or moved"):
        launch(PLAN, folder, job="tiny_jobs:deletes_the_folder", hang_s=100, timeout_s=200)


def test_a_fork_server_that_is_killed(folder: RunFolder) -> None:
    with launcher(folder, "goes_on") as process:
        notes = wait_until_seen(folder, process)
        (server,) = {parent_of(note["pid"]) for note in notes}
        os.kill(server, signal.SIGKILL)
        _, err = process.communicate(timeout=END_S)
    assert process.returncode == 1
    assert err.startswith("the run was killed: its fork server, from which the workers are forked, is gone")
    for note in notes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(note.pop("child"), signal.SIGKILL)
    nothing_left(notes)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
def test_a_worker_that_is_stopped(folder: RunFolder) -> None:
    error, took_s = fails(folder, "stopped", HANG_S)
    lines = str(error).splitlines()
    assert re.match(rf"worker 1 \(cpu:{CORES[-1]}\) hangs: {STILL}; its process is", lines[0])
    assert lines[1].strip() == AT
    assert took_s < HANG_S + END_S


@pytest.mark.slow
def test_a_worker_that_loops_and_ignores_sigterm(folder: RunFolder) -> None:
    error, took_s = fails(folder, "loops", HANG_S)
    text = str(error)
    assert re.fullmatch(rf"worker 1 \(cpu:{CORES[-1]}\) hangs: {STILL}", text.splitlines()[0])
    assert AT in text
    assert "worker 0 is at: step 0, all-reduce" in text
    assert "in spin_for_ever" in text
    assert took_s < HANG_S + END_S


@pytest.mark.slow
def test_workers_that_wait_for_each_other(folder: RunFolder) -> None:
    error, took_s = fails(folder, "waits", HANG_S)
    assert re.fullmatch(rf"worker 0 \(cpu:{CORES[0]}\) hangs: {STILL}", str(error).splitlines()[0])
    assert "worker 1 is at: step 0, stage 1, micro-batch 0, receive" in str(error)
    assert "in recv" in str(error)
    assert took_s < HANG_S + END_S


@pytest.mark.parametrize("how", ["raises", pytest.param("hangs", marks=pytest.mark.slow), "killed"])
def test_events_until_the_fault(folder: RunFolder, how: str) -> None:
    """Every worker tells what it did; one that was killed up to its last whole step, others what they were at, too."""
    _, took_s = fails(folder, f"{how}_in_a_step", HANG_S if how == "hangs" else 100.0)
    assert took_s < END_S + (HANG_S if how == "hangs" else 0)
    folder.finish("failed", {})
    trace = read_trace(folder, unfinished=True)
    assert [worker.rank for worker in trace.workers] == [0, 1]
    assert (trace.steps, trace.unfinished_step) == ((0, 1, 2, 3), 3)
    last = [worker.events[-1] for worker in trace.workers if how != "killed" or worker.rank == 0]
    assert all((one.step, one.note) == (3, "unfinished") for one in last)
    assert [one.kind for one in last] == ["collective", "forward"][: len(last)]
    assert [(one.stage, one.microbatch) for one in last][1:] == [(1, 2)][: len(last) - 1]
    if how == "hangs":
        assert min(one.seconds for one in last) > HANG_S - 1
    if how == "killed":
        assert [worker.events[-1].step for worker in trace.workers] == [3, 2]
        assert (folder.worker(1).path / "events.parquet").is_file()
        assert [share.worker for share in breakdown(trace, 3)] == [0]
    whole = read_trace(folder)
    assert [worker.rank for worker in whole.workers] == [0, 1]
    assert (whole.steps, whole.unfinished_step) == ((0, 1, 2), None)
    for number in trace.steps:
        for share in breakdown(trace, number):
            assert sum(share.parts().values()) == pytest.approx(share.step_s)


def test_an_error_of_ours_is_its_sentence(folder: RunFolder) -> None:
    error, _ = fails(folder, "out_of_memory")
    text = str(error)
    assert "failed: worker 1 is out of memory during forward: 364 TiB more wanted on the host, where " in text
    assert "Traceback" not in text
    assert AT in text


def test_wrong_use_found_by_workers_stays_wrong_use(folder: RunFolder) -> None:
    with pytest.raises(UsageError, match="there is no task 'digit'; did you mean 'digits'\\?") as caught:
        launch(folder.plan(), folder, job="tiny_jobs:wrong_use", timeout_s=200)
    assert caught.value.exit_code == 2


@contextlib.contextmanager
def launcher(folder: RunFolder, job: str) -> Iterator[subprocess.Popen[str]]:
    """A launcher in a process of its own, which is gone afterwards."""
    command = [sys.executable, "-c", SCRIPT, str(folder.path), f"tiny_jobs:{job}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_is_clean(folder: RunFolder) -> None:
    with launcher(folder, "goes_on") as process:
        notes = wait_until_seen(folder, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=END_S)
    assert (process.returncode, out, err) == (130, "", "")
    nothing_left(notes)


@pytest.mark.slow
def test_sigterm_ends_a_run_that_leaves_nothing(folder: RunFolder) -> None:
    with launcher(folder, "goes_on") as process:
        notes = wait_until_seen(folder, process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=END_S)
    assert (process.returncode, out, err) == (130, "", "the run was ended by SIGTERM\n")
    nothing_left(notes)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_launcher_that_is_killed_leaves_no_worker(folder: RunFolder) -> None:
    with launcher(folder, "goes_on") as process:
        notes = wait_until_seen(folder, process)
        children = [note.pop("child") for note in notes]
        try:
            process.kill()
            process.wait(timeout=END_S)
            nothing_left(notes)
        finally:
            for child in children:  # a worker's own child is its own affair when SIGKILL takes both parents
                os.kill(child, signal.SIGKILL)
