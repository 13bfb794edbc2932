from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from stagewright.errors import UsageError
from stagewright.fabric.coordinator import SILENT_S, Coordinator, Place, Settings
from stagewright.fabric.trials import TrialTable, read_trials, write_trials
from stagewright.fabric.workload import Message, Workload, explicit

LOCAL = Place(name="local")


def test_local_ranks() -> None:
    workload = explicit([8, 2600], 3, trials=20, warmup=2).with_delays({1: 0.01})
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
    workload = explicit([8], 2, trials=1_000_000, time_limit_s=0.5)
    with Coordinator(workload, [LOCAL] * 2, Settings(steps=False)) as coordinator:
        measured = coordinator.run()
    assert measured.error is None
    assert 0 < measured.trials.num_trials < 1_000_000
    assert measured.wall_s < 20


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_dead_rank_is_named_and_its_trials_are_kept(how: signal.Signals) -> None:
    workload = explicit([2600], 4, trials=1_000_000)
    with Coordinator(workload, [LOCAL] * 4, Settings()) as coordinator:
        victim = coordinator._members[2].process
        assert victim is not None
        killed: list[float] = []

        def kill() -> None:
            killed.append(time.monotonic())
            os.kill(victim.pid, how)

        timer = threading.Timer(2.0, kill)
        timer.start()
        measured = coordinator.run()
        timer.join()
        stopped_s = time.monotonic() - killed[0]
        assert measured.dead == [2]
        assert measured.error is not None
        assert "rank 2 (local)" in measured.error
        assert stopped_s < SILENT_S + 6
        assert measured.trials.num_trials > 0
        assert measured.trials.num_wrong == 0


def test_places_must_match() -> None:
    with pytest.raises(UsageError, match="4 ranks, but there are 2 places"):
        Coordinator(explicit([8], 4), [LOCAL] * 2, Settings())


def test_no_agent_there() -> None:
    place = Place(name="nowhere", host="127.0.0.1", port=1)
    with (
        pytest.raises(UsageError, match="no agent answers at nowhere"),
        Coordinator(explicit([8], 1), [place], Settings(token=b"x" * 16, meet_s=0.3)),
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


def test_torch_refuses_sizes_that_do_not_divide() -> None:
    workload = explicit([10], 2, trials=1)
    with Coordinator(workload, [LOCAL] * 2, Settings(engine="gloo")) as coordinator:
        measured = coordinator.run()
    assert measured.error is not None
    assert "can't send 10 bytes" in measured.error


def test_trials_survive_their_file(tmp_path: Path) -> None:
    workload = explicit([8, 16], 2, trials=4, warmup=0)
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
    workload = explicit([60000], 4, trials=3, warmup=0)
    with Coordinator(workload, [LOCAL] * 4, Settings(buffer_bytes=4096, probe=False)) as coordinator:
        measured = coordinator.run()
    assert measured.error is None
    assert measured.trials.num_trials == 3
    assert measured.trials.num_wrong == 0
