"""The record of events: nothing outside steps, nested or disjoint inside, bounded for long runs."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest

from stagewright.engine.worker.faults import Doing
from stagewright.engine.worker.recorder import Recorder
from stagewright.runs.journal import read_journal, rows_of


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """A recorder whose clock ticks once a reading: 1.0, 2.0, 3.0, …"""
    ticks = itertools.count(1)
    found = Recorder()
    found.open(clock=lambda: float(next(ticks)))
    return found


def spans(rows: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    return [(row["kind"], row["start_s"], row["end_s"]) for row in rows]


def test_nothing_is_recorded_outside_steps(recorder: Recorder) -> None:
    recorder.add("forward", recorder.now())
    recorder.begin_overlapped(8, "data")()
    with recorder.step(3):
        recorder.stage, recorder.microbatch = 1, 2
        start = recorder.now()
        recorder.add("send", start, stream="send", num_bytes=8, peer=0, note="activation")
    recorder.add("forward", recorder.now())
    step, sent = recorder.rows()
    assert (step["kind"], step["step"], step["start_s"], step["end_s"]) == ("step", 3, 1.0, 4.0)
    assert sent == {
        "step": 3,
        "kind": "send",
        "stream": "send",
        "stage": 1,
        "microbatch": 2,
        "start_s": 2.0,
        "end_s": 3.0,
        "bytes": 8,
        "peer": 0,
        "note": "activation",
    }
    recorder.close()
    with recorder.step(4):
        recorder.add("forward", recorder.now())
    assert len(recorder.rows()) == 2


def test_what_is_nested_comes_after_what_is_around_it(recorder: Recorder) -> None:
    with recorder.step(0):
        outer = recorder.now()
        inner = recorder.now()
        recorder.add("recompute", inner)
        recorder.add("backward", outer)
    assert spans(recorder.rows()) == [("step", 1.0, 6.0), ("backward", 2.0, 5.0), ("recompute", 3.0, 4.0)]


def test_collectives_beside_computing_are_disjoint(recorder: Recorder) -> None:
    with recorder.step(0):
        first, second = recorder.begin_overlapped(8, "data"), recorder.begin_overlapped(8, "data")  # begin at 2 and 3
        first()  # ends at 4
        second()  # ends at 5
        third = recorder.begin_overlapped(8, "data")  # begins at 6
    third()  # ends after the step, at 8: held to its end, at 7
    assert spans(recorder.rows())[1:] == [("collective", 2.0, 4.0), ("collective", 4.0, 5.0), ("collective", 6.0, 7.0)]


def test_waiting_inside_ends_with_what_is_around_it(recorder: Recorder) -> None:
    with recorder.step(0):
        start = recorder.now()
        recorder.wait_inside("data")
        recorder.add("backward", start)
        recorder.add("optimizer", recorder.now())
    assert spans(recorder.rows())[1:] == [("backward", 2.0, 4.0), ("collective", 3.0, 4.0), ("optimizer", 5.0, 6.0)]


def test_of_a_long_run_the_last_steps_are_kept() -> None:
    recorder = Recorder()
    recorder.open(most_steps=3)
    for number in range(10):
        with recorder.step(number):
            recorder.add("forward", recorder.now())
    assert [row["step"] for row in recorder.rows()] == [7, 7, 8, 8, 9, 9]


def test_a_step_that_fails_is_not_recorded(recorder: Recorder) -> None:
    with pytest.raises(ValueError, match="no"), recorder.step(0):
        raise ValueError("no")
    assert not recorder.is_recording
    assert recorder.rows() == []


def test_what_is_left_of_a_run_that_fails(recorder: Recorder) -> None:
    """Whole steps, then the one under way with what is being done in it; nothing where all was taken already."""
    with recorder.step(0):
        recorder.add("forward", recorder.now())
    with contextlib.suppress(KeyError), recorder.step(1):
        recorder.add("forward", recorder.now())
        raise KeyError
    doing = Doing(count=9, step=1, stage=1, microbatch=2, action="backward (I)")
    found = recorder.rest(doing)
    assert [(one["step"], one["kind"], one["note"]) for one in found] == [
        (0, "step", None),
        (0, "forward", None),
        (1, "step", "unfinished"),
        (1, "forward", None),
        (1, "backward", "unfinished"),
    ]
    assert (found[-1]["stage"], found[-1]["microbatch"], found[-1]["start_s"]) == (1, 2, found[-2]["end_s"])
    assert found[-1]["end_s"] == found[2]["end_s"] >= found[-1]["start_s"]
    assert len(recorder.rest(Doing(action="compare with serial"))) == 4
    assert len(recorder.rows()) == 2
    assert recorder.rest(doing) == []


def journalled(folder: Path) -> list[tuple[int, int]]:
    """The steps that are on the disk, each with its number of events."""
    return [(one.step, len(one.events)) for one in read_journal(folder)]


def test_a_step_is_on_the_disk_when_it_ends(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.keep_in(tmp_path)
    recorder.open(most_steps=2)
    for number in range(3):
        with recorder.step(number):
            recorder.add("forward", recorder.now())
            assert len(journalled(tmp_path)) == number
        assert journalled(tmp_path)[-1] == (number, 1)
    rows = [row for one in read_journal(tmp_path)[-2:] for row in rows_of(one)]
    recorder.close()
    assert recorder.rows() == rows
    recorder.open(clock=lambda: 0.0)  # of a reading that someone counts
    with recorder.step(9):
        recorder.add("forward", recorder.now())
    assert journalled(tmp_path)[-1] == (2, 1)


def test_a_step_on_a_device_is_on_the_disk_when_the_device_is_done_with_it(tmp_path: Path) -> None:
    """Nothing is waited for; marks are as CUDA's events: times of those that are not over can't be asked for."""
    done_s = 0.0
    moments = itertools.count(1)

    class Mark:
        def __init__(self) -> None:
            self.at_s = float(next(moments))

        def query(self) -> bool:
            return self.at_s <= done_s

        def elapsed_time(self, other: Mark) -> float:
            if not other.query():
                raise RuntimeError("both events must be completed")
            return (other.at_s - self.at_s) * 1e3

    recorder = Recorder()
    recorder.keep_in(tmp_path)
    recorder.open()
    recorder._clock = Mark
    with recorder.step(0):  # at 1
        recorder.add("forward", recorder.now())  # from 2 to 3
        beside = recorder.begin_overlapped(8, "data")  # from 4
    beside()  # the step was over at 5, this one is at 6
    assert journalled(tmp_path) == []
    done_s = 5.0
    with recorder.step(1):  # at 7
        assert journalled(tmp_path) == []
    done_s = 6.0
    with recorder.step(2):
        assert journalled(tmp_path) == [(0, 2)]
    done_s = 100.0
    recorder.close()
    assert journalled(tmp_path) == [(0, 2), (1, 0), (2, 0)]
    (first, *_) = read_journal(tmp_path)
    assert [(row["kind"], row["start_s"] - first.begin_s, row["end_s"] - first.begin_s) for row in rows_of(first)] == [
        ("step", 0.0, pytest.approx(4.0)),
        ("forward", pytest.approx(1.0), pytest.approx(2.0)),
        ("collective", pytest.approx(3.0), pytest.approx(4.0)),
    ]


def test_a_step_that_still_grows_while_it_is_written_is_written_later(tmp_path: Path) -> None:
    """A collective's end may be added by another thread at any moment, before the device is there."""
    marks: list[Any] = []
    late: list[Any] = []

    class Mark:
        def __init__(self) -> None:
            self.is_over = True
            marks.append(self)

        def query(self) -> bool:
            return self.is_over

        def elapsed_time(self, other: Mark) -> float:
            while late:
                late.pop()()
                marks[-1].is_over = False
            if not other.is_over:
                raise RuntimeError("both events must be completed")
            return 1.0

    recorder = Recorder()
    recorder.keep_in(tmp_path)
    recorder.open()
    recorder._clock = Mark
    with recorder.step(0):
        recorder.add("forward", recorder.now())
        late.append(recorder.begin_overlapped(8, "data"))
    assert (late, journalled(tmp_path)) == ([], [])
    marks[-1].is_over = True
    recorder.close()
    assert journalled(tmp_path) == [(0, 2)]
