from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stagewright.errors import RunError, UsageError
from stagewright.fabric.ranks import coordinator as coordinator_module
from stagewright.fabric.ranks.coordinator import SILENT_S, Coordinator, RankLocation, Settings, _Member
from stagewright.fabric.ranks.wire import TO_COORDINATOR, Channel, Frame
from stagewright.fabric.traffic.workload import Message, Workload, from_sizes
from stagewright.fabric.trials import TrialTable, read_trials, write_trials

LOCAL = RankLocation(name="local")


def test_local_ranks() -> None:
    workload = from_sizes([8, 2600], 3, trials=20, warmup=2).with_delays({1: 0.01})
    with Coordinator(workload, [LOCAL] * 3, Settings()) as coordinator:
        measured = coordinator.run()
    assert measured.error is None
    trials = measured.trials
    assert (trials.num_trials, trials.num_messages, trials.num_ranks) == (20, 2, 3)
    assert trials.num_wrong == 0
    assert trials.rows["trial"][:, 0, 0].tolist() == list(range(20))
    assert float(trials.durations(0).min()) >= 0.01, "nobody ends before the late one begins"
    assert np.median(trials.rows["late_s"][:, :, 1]) >= 0.01
    assert np.median(trials.rows["late_s"][:, :, 0]) < 0.005
    assert {(pair.source, pair.destination) for pair in measured.pairs} == {
        (one, two) for one in range(3) for two in range(3) if one != two
    }
    assert len(measured.steps[0]) == 20 * 2 * 4
    assert {(link["source"], link["destination"]) for link in measured.links} == {
        (pair.source, pair.destination) for pair in measured.pairs
    }


def test_groups_that_send_at_the_same_time() -> None:
    messages = (
        Message(name="there", algorithm="pipeline", num_bytes=5000, groups=((0, 1), (2, 3))),
        Message(name="one pair", algorithm="ring", num_bytes=5000, groups=((1, 3),)),
    )
    workload = Workload(name="groups", num_ranks=4, messages=messages, trials=5)
    for overlap in (False, True):
        with Coordinator(
            Workload(name="groups", num_ranks=4, messages=messages, trials=5, overlap=overlap), [LOCAL] * 4, Settings()
        ) as coordinator:
            measured = coordinator.run()
        assert measured.error is None
        assert measured.trials.num_trials == workload.trials
        assert measured.trials.num_wrong == 0
        assert measured.trials.rows["took_part"][0].tolist() == [[1, 1, 1, 1], [0, 1, 0, 1]]


def test_time_ends_a_run() -> None:
    workload = from_sizes([8], 2, trials=1_000_000, time_limit_s=0.5)
    with Coordinator(workload, [LOCAL] * 2, Settings(steps=False)) as coordinator:
        measured = coordinator.run()
    assert measured.error is None
    assert 0 < measured.trials.num_trials < 1_000_000


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (signal.SIGKILL, "died"),
        pytest.param(signal.SIGSTOP, f"sent no heartbeat for {SILENT_S:.0f} s", marks=pytest.mark.slow),
    ],
)
def test_a_dead_rank_is_named_and_its_trials_are_kept(how: signal.Signals, why: str) -> None:
    workload = from_sizes([2600], 4, trials=1_000_000)
    with Coordinator(workload, [LOCAL] * 4, Settings()) as coordinator:
        victim = coordinator._members[2].process
        assert victim is not None
        killed: list[float] = []

        def kill(finished: int, _: int) -> None:
            if finished and not killed:
                killed.append(time.monotonic())
                os.kill(victim.pid, how)

        measured = coordinator.run(kill)
        stopped_s = time.monotonic() - killed[0]
        assert measured.dead == [2]
        assert measured.error is not None
        assert f"rank 2 (local) {why}" in measured.error
        assert stopped_s < Settings().hang_s - 5
        assert measured.trials.num_trials > 0
        assert measured.trials.num_wrong == 0


def gathered(monkeypatch: pytest.MonkeyPatch, looks: list[tuple[float, str]]) -> list[dict[str, Any]]:
    """What a coordinator gathers from one rank: looks that take so long, with a word from it or without."""
    member: Any = _Member(rank=0, location=LOCAL, channel=None)  # type: ignore[arg-type]
    coordinator = Coordinator(from_sizes([8], 1), [LOCAL], Settings())
    now_s = 0.0

    def listen(_: float) -> None:
        nonlocal now_s
        seconds, word = looks.pop(0)
        now_s += seconds
        if word:
            member.heartbeat_s = now_s
            coordinator._handle(member, Frame(word, {}, b""))

    monkeypatch.setattr(coordinator_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(coordinator, "_listen", listen)
    coordinator._members = [member]
    try:
        return coordinator._gather("listening", 60.0)
    finally:
        coordinator._members = []
        coordinator.close()


def test_heartbeat_timeout_starts_with_the_first_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = [(0.2, "")] * 50
    with pytest.raises(RunError, match="sent no heartbeat for 6 s"):
        gathered(monkeypatch, [(0.2, "alive"), *silent, (0.2, "listening")])
    assert gathered(monkeypatch, [*silent, (0.2, "listening")]) == [{}], "to start takes its time"
    assert gathered(monkeypatch, [(0.2, "alive"), (20.0, ""), (0.2, "listening")]) == [{}], "the listener was held up"


def test_a_rank_that_is_stopped_in_the_middle_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    member = _Member(rank=0, location=LOCAL, channel=Channel(ours, None, accepts=TO_COORDINATOR))
    monkeypatch.setattr(Coordinator, "_contact", lambda *_: member)
    monkeypatch.setattr(coordinator_module, "SILENT_S", 0.1)
    theirs.sendall(b"half")
    with theirs, Coordinator(from_sizes([8], 1), [LOCAL], Settings()) as coordinator:
        measured = coordinator.run()
    assert measured.dead == [0]
    assert "rank 0 (local) sent no heartbeat" in (measured.error or "")


def test_number_of_locations_must_match() -> None:
    with pytest.raises(UsageError, match="4 ranks, got 2 locations"):
        Coordinator(from_sizes([8], 4), [LOCAL] * 2, Settings())


def test_no_agent_there() -> None:
    place = RankLocation(name="nowhere", host="127.0.0.1", port=1)
    with (
        pytest.raises(UsageError, match="no agent answers at nowhere"),
        Coordinator(from_sizes([8], 1), [place], Settings(token=b"x" * 16, contact_s=0.3)),
    ):
        pass


@pytest.mark.slow
def test_torch_sends_the_same() -> None:
    names = ["ring", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "pipeline"]
    messages = tuple(
        Message(name=name, algorithm=name, num_bytes=4800, groups=((0, 1, 2),) if name != "ring" else ((2, 0),))
        for name in names
    )
    workload = Workload(name="torch", num_ranks=3, messages=messages, trials=3, warmup=1)
    with Coordinator(workload, [LOCAL] * 3, Settings(engine="gloo")) as coordinator:
        measured = coordinator.run()
    assert measured.error is None
    assert measured.trials.num_trials == 3
    assert measured.trials.num_wrong == 0


def test_torch_rejects_sizes_that_do_not_divide() -> None:
    workload = from_sizes([10], 2, trials=1)
    with Coordinator(workload, [LOCAL] * 2, Settings(engine="gloo")) as coordinator:
        measured = coordinator.run()
    assert measured.error is not None
    assert "cannot send 10 bytes" in measured.error


def test_trials_survive_their_file(tmp_path: Path) -> None:
    workload = from_sizes([8, 16], 2, trials=4, warmup=0)
    with Coordinator(workload, [LOCAL] * 2, Settings(probe=False)) as coordinator:
        table = coordinator.run().trials
    table.void[2] = True
    write_trials(table, ["a", "b"], [8, 16], tmp_path / "trials.parquet")
    again = read_trials(tmp_path / "trials.parquet")
    assert np.array_equal(again.rows, table.rows)
    assert again.void.tolist() == [False, False, True, False]
    assert len(again.durations(0)) == 3


def test_no_trials_are_a_table_too() -> None:
    assert TrialTable.join([], 0).num_trials == 0


@pytest.mark.slow
def test_tiny_buffers_do_not_block() -> None:
    workload = from_sizes([60000], 4, trials=3, warmup=0)
    with Coordinator(workload, [LOCAL] * 4, Settings(buffer_bytes=4096, probe=False)) as coordinator:
        measured = coordinator.run()
    assert measured.error is None
    assert measured.trials.num_trials == 3
    assert measured.trials.num_wrong == 0
