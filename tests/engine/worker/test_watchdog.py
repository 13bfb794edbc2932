"""Slow is not hung; the one to blame is the one that the others wait for."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from stagewright.engine.parallel import trainer as trainer_module
from stagewright.engine.worker import clock as clock_module, watchdog as watch_module
from stagewright.engine.worker.faults import Activity, Doing, Fault
from stagewright.engine.worker.process import is_stopped
from stagewright.engine.worker.watchdog import OUTSIDE, START_S, ProgressClock, StoreWatchdog, blame
from stagewright.runs.worker_folder import WorkerFolder
from stagewright.spec.plan import Mesh


def test_clock_counts_from_the_last_change() -> None:
    clock = ProgressClock(3.0, 100.0)
    assert clock.overdue(0, 102.9) is None
    assert clock.overdue(0, 105.9) == 3.0
    assert clock.overdue(1, 106.0) is None
    assert clock.overdue(1, 108.5) is None
    assert clock.overdue(1, 110.0) == 4.0


def test_clock_gives_a_start_more_time() -> None:
    clock = ProgressClock(3.0, 0.0)
    assert clock.overdue(0, 0.0, starting=True) is None
    assert clock.overdue(0, START_S - 0.1, starting=True) is None
    assert clock.overdue(0, START_S, starting=True) == START_S
    patient = ProgressClock(1000.0, 0.0)
    assert patient.overdue(0, 999.0, starting=True) is None


def test_blame() -> None:
    forward, receive = Doing(action="forward", count=5), Doing(action="receive activation", count=4)
    no, yes = [False] * 3, [True] * 3
    assert blame([receive, forward, receive], no, yes) == 1
    assert blame([receive, forward, receive], [False, False, True], yes) == 2
    assert blame([receive, receive, Doing(action="receive", count=2)], no, yes) == 2
    assert blame([forward, receive, receive], no, [False, True, True]) == 1


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the state of a process is read from /proc")
def test_a_stopped_process_is_seen() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert not is_stopped(process.pid)
            os.kill(process.pid, signal.SIGSTOP)
            until_s = time.monotonic() + 60
            while not is_stopped(process.pid) and time.monotonic() < until_s:
                time.sleep(0.01)
            assert is_stopped(process.pid)
        finally:
            process.kill()
    assert not is_stopped(process.pid)


def watch(
    store: HashStore, activity: Activity, ended: list[Fault], worker: int = 0, hang_s: float = 0.4, grace_s: float = 0.1
) -> StoreWatchdog:
    return StoreWatchdog(
        store, worker=worker, device="cpu:0", activity=activity, hang_s=hang_s, end=ended.append, grace_s=grace_s
    ).start()


def wait_for(ended: list[Fault]) -> Fault:
    until_s = time.monotonic() + 60
    while not ended and time.monotonic() < until_s:
        time.sleep(0.01)
    return ended[0]


def test_another_workers_failure_ends_this_one() -> None:
    store, activity, ended = HashStore(), Activity(), []
    activity.begin("forward", step=4)
    mine = watch(store, activity, ended, hang_s=60)
    other = watch(store, Activity(), [], worker=1, hang_s=60)
    other.stop()
    other.report(Fault(worker=1, kind="raised", message="ValueError: boom"))
    other.report(Fault(worker=1, kind="raised", message="a later one is not told"))
    fault = wait_for(ended)
    mine.stop()
    assert (fault.worker, fault.kind, fault.doing.step) == (0, "lost-peer", 4)
    assert fault.message == "worker 1 failed: ValueError: boom"


class Clock:
    """A clock that goes on only while a watch waits, and says when."""

    def __init__(self, on_wait: Callable[[float], None]) -> None:
        self.now_s = 0.0
        self._on_wait = on_wait

    def monotonic(self) -> float:
        return self.now_s

    def time_ns(self) -> int:
        return 0

    def wait(self, seconds: float) -> bool:
        self.now_s += seconds
        self._on_wait(self.now_s)
        return False


def test_no_progress_of_any_worker_is_a_hang_and_some_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    store, activity, ended = HashStore(), Activity(), []
    activity.begin("receive")

    def another_goes_on_for_two_seconds(now_s: float) -> None:
        if now_s < 2:
            store.add("progress", 1)

    clock = Clock(another_goes_on_for_two_seconds)
    monkeypatch.setattr(watch_module, "time", clock)
    one = StoreWatchdog(store, worker=0, device="cpu:0", activity=activity, hang_s=1, end=ended.append, grace_s=0.5)
    one._stop = clock  # type: ignore[assignment]
    one._run()
    (fault,) = ended
    assert (fault.kind, fault.message) == ("hung", "no worker has made progress for 1 s")
    assert clock.now_s == pytest.approx(1.9 + 1.0 + 0.5, abs=0.11), "the last progress, the limit, the other's turn"
    assert "one._run()" in fault.traceback  # where the main thread is


def test_a_waiting_worker_lets_the_stuck_one_report_first() -> None:
    """The reported fault is that of the worker that does not wait, whichever detects the hang first."""
    for first in (0, 1):
        store, waiting, stuck = HashStore(), Activity(), Activity()
        waiting.begin("receive gradient")
        stuck.begin("forward")
        ended: list[list[Fault]] = [[], []]
        pair = [(waiting, ended[0], 0), (stuck, ended[1], 1)]
        watches = [
            StoreWatchdog(store, worker=rank, device="", activity=one, hang_s=0.4, end=found.append, grace_s=1.0)
            for one, found, rank in pair
        ]
        for at in (first, 1 - first):
            watches[at].start()
            time.sleep(0.1)
        faults = [wait_for(found) for found in ended]
        for one in watches:
            one.stop()
        assert [(fault.worker, fault.kind) for fault in faults] == [(0, "lost-peer"), (1, "hung")]
        assert faults[0].message.startswith("worker 1 failed: no worker has made progress")


def test_code_of_ones_own_may_take_its_time_until_others_wait_for_it() -> None:
    store, mine, other = HashStore(), Activity(), Activity()
    mine.begin(OUTSIDE)
    other.begin(OUTSIDE)
    ended: list[list[Fault]] = [[], []]
    watches = [
        watch(store, one, found, rank, grace_s=1.5)
        for rank, (one, found) in enumerate(zip((mine, other), ended, strict=True))
    ]
    time.sleep(1.0)
    assert ended == [[], []]
    other.begin("receive gradient")
    faults = [wait_for(found) for found in ended]
    for one in watches:
        one.stop()
    assert [(fault.worker, fault.kind) for fault in faults] == [(0, "hung"), (1, "lost-peer")]
    assert "in test_code_of_ones_own" in faults[0].traceback


def test_a_store_that_vanishes_ends_no_code_of_ones_own() -> None:
    class Gone:
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("connection reset")

    mine, ended = Activity(), []
    mine.begin(OUTSIDE)
    one = watch(Gone(), mine, ended)  # type: ignore[arg-type]
    one._thread.join(60)
    assert not one._thread.is_alive()
    assert not ended
    mine.begin("forward")
    watch(Gone(), mine, ended)  # type: ignore[arg-type]
    assert wait_for(ended).message.startswith("the launcher's store is gone")


def test_a_watch_that_is_stopped_says_nothing() -> None:
    store, ended = HashStore(), []
    mine = watch(store, Activity(), ended, hang_s=60, grace_s=60)
    mine.report(Fault(worker=1, kind="raised", message="boom"))
    mine.stop()
    assert not mine._thread.is_alive()
    assert not ended


class Blocks:
    """A store behind a link that is down: calls don't return until the test ends."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def add(self, key: str, amount: int) -> int:
        self.released.wait(60)
        raise RuntimeError("the test is over")

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        return bytes(self.add(key, 0))


def test_a_store_that_does_not_answer_ends_this_worker() -> None:
    store, activity, ended = Blocks(), Activity(), []
    activity.begin("reduce")
    one = StoreWatchdog(
        store,  # type: ignore[arg-type]
        worker=1,
        device="cpu:0",
        activity=activity,
        hang_s=0.4,
        end=ended.append,
        grace_s=0.1,
        address="198.18.0.1:29500",
    ).start()
    fault = wait_for(ended)
    one.report(fault)  # returns, although the store does not
    one.stop()
    store.released.set()
    assert (fault.worker, fault.kind) == (1, "lost-peer")
    assert fault.message.startswith("the store at 198.18.0.1:29500 has not answered for 0 s: that machine")


def test_code_of_ones_own_goes_on_without_the_store() -> None:
    store, activity, ended = Blocks(), Activity(), []
    activity.begin(OUTSIDE)
    one = watch(store, activity, ended, hang_s=0.2)  # type: ignore[arg-type]
    time.sleep(0.6)
    assert not ended
    one.stop()
    store.released.set()


def test_a_worker_that_no_longer_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 1 writes to the store for three seconds; worker 2 has finished, and is not blamed."""
    store, activity, ended = HashStore(), Activity(), []
    activity.begin("reduce")
    store.set("alive 2", "")

    def on_wait(now_s: float) -> None:
        if now_s < 3:
            store.add("progress", 1)
            store.set("alive 1", f"{now_s} node7")

    clock = Clock(on_wait)
    monkeypatch.setattr(watch_module, "time", clock)
    one = StoreWatchdog(
        store, worker=0, device="cpu:0", activity=activity, hang_s=8, end=ended.append, num_workers=3, grace_s=0.5
    )
    one._stop = clock  # type: ignore[assignment]
    one._run()
    (fault,) = ended
    assert (fault.worker, fault.kind) == (0, "lost-peer")
    assert fault.message.startswith("worker 1 on node7 has not answered for 4 s: stopped, or that machine")
    assert clock.now_s == pytest.approx(2.5 + 8.0, abs=1.01), "at the limit, without waiting for its report"
    assert b"worker 1 on node7" in store.get("failed")


def test_workers_that_wait_for_a_checkpoint_or_for_clocks_are_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 hangs while it writes its part of a checkpoint; worker 0 waits at the barrier."""
    at: list[Doing] = []
    doing = Activity()
    for module in (trainer_module, clock_module):
        monkeypatch.setattr(module, "activity", doing)
    monkeypatch.setattr(trainer_module.dist, "barrier", lambda: at.append(doing.now()))
    monkeypatch.setattr(clock_module, "exchange", lambda *workers: at.append(doing.now()) or (0.0, 0.0))
    doing.begin("checkpoint", step=4)
    stuck = doing.now()
    two_workers = SimpleNamespace(plan=SimpleNamespace(mesh=Mesh(data=2)))
    trainer_module.Trainer._barrier(two_workers)  # type: ignore[arg-type]
    assert (doing.action, doing.step) == ("checkpoint", 4)
    clock_module.write_clock(SimpleNamespace(rank=0, mesh=Mesh(data=2)), WorkerFolder(tmp_path))  # type: ignore[arg-type]
    for waiting in at:
        assert blame([waiting, stuck], [False, False], [True, True]) == 1
    assert len(at) == 2
