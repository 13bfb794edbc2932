"""The journal of a worker's steps: whole records are there after a SIGKILL, half a record is not; files stay small."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stagewright.runs.journal import Journal, RecordedStep, journal_paths, read_journal, rows_of
from stagewright.runs.worker_folder import WorkerFolder


def step(number: int, note: str | None = None) -> RecordedStep:
    return RecordedStep(
        step=number,
        note=note,
        begin_s=number + 0.1,
        end_s=number + 0.9,
        events=[
            ("forward", "compute", 1, 0, number + 0.2, number + 0.3, None, None, None),
            ("send", "send", 1, 0, number + 0.3, number + 0.4, 2**40, 3, "activation"),
            ("collective", "collective", None, None, number + 0.5, number + 0.6, 8, None, "data"),
        ],
    )


def test_what_was_appended_is_read_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "deep")
    steps = [step(0), step(1, "4 batches"), RecordedStep(step=2, note=None, begin_s=2.0, end_s=2.5, events=[])]
    for at, one in enumerate(steps):
        journal.append(one)
        assert read_journal(tmp_path / "deep") == steps[: at + 1]
    journal.close()
    journal.append(step(3))
    assert len(read_journal(tmp_path / "deep")) == 3
    Journal(tmp_path / "deep").close()
    assert read_journal(tmp_path / "deep") == []


@pytest.mark.parametrize("cut", [1, 3, 40, 150])
def test_half_a_record_is_left_out(tmp_path: Path, cut: int) -> None:
    journal = Journal(tmp_path)
    for number in range(3):
        journal.append(step(number))
    path, _ = journal_paths(tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_journal(tmp_path) == [step(0), step(1)]


def test_damage_ends_what_can_be_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    path, _ = journal_paths(tmp_path)
    journal.append(step(0))
    good = path.stat().st_size
    journal.append(step(1, "new"))
    path.write_bytes(path.read_bytes().replace(b'["new"]', b'["new"?'))
    assert read_journal(tmp_path) == [step(0)]
    path.write_bytes(path.read_bytes()[:good] + b"\x20\0\0\0" + b"?" * 99)
    assert read_journal(tmp_path) == [step(0)]


def test_of_a_long_run_the_last_steps_are_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path, most_steps=4)
    for number in range(30):
        journal.append(step(number))
        assert [one.step for one in read_journal(tmp_path)][-4:] == list(range(max(0, number - 3), number + 1))
    assert len(read_journal(tmp_path)) < 2 * 4
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 8 * 400


def test_a_disk_that_is_full_ends_the_journal_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    journal.append(step(0))
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, content: write(file, content[:20]))
    journal.append(step(1))
    monkeypatch.undo()
    journal.append(step(2))
    assert read_journal(tmp_path) == [step(0)]


def test_rows_are_nested_or_disjoint_and_within_their_step() -> None:
    one = RecordedStep(
        step=5,
        note=None,
        begin_s=0.0,
        end_s=9.0,
        events=[
            ("recompute", "compute", 0, 0, 2.0, 3.0, None, None, None),
            ("backward", "compute", 0, 0, 1.0, 4.0, None, None, None),
            ("collective", "collective", None, None, 4.0, 6.0, 8, None, "data"),
            ("collective", "collective", None, None, 5.0, 11.0, 8, None, "data"),
        ],
    )
    assert [(row["kind"], row["start_s"], row["end_s"]) for row in rows_of(one)] == [
        ("step", 0.0, 9.0),
        ("backward", 1.0, 4.0),
        ("recompute", 2.0, 3.0),
        ("collective", 4.0, 6.0),
        ("collective", 6.0, 9.0),
    ]
    assert {row["step"] for row in rows_of(one)} == {5}


def test_a_killed_worker_leaves_its_steps(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from stagewright.runs.journal import Journal, RecordedStep\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "event = ('forward', 'compute', 0, 1, 0.25, 0.5, None, None, None)\n"
        "for step in range(5):\n"
        "    journal.append(RecordedStep(step=step, note=None, begin_s=0.0, end_s=1.0, events=[event]))\n"
        "assert 'torch' not in sys.modules and 'pyarrow' not in sys.modules\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    worker = WorkerFolder(tmp_path)
    rows = worker.events()
    assert [(row["step"], row["kind"]) for row in rows[-2:]] == [(4, "step"), (4, "forward")]
    worker.finalize_events()
    assert {path.name for path in tmp_path.iterdir()} == {"events.parquet"}
    assert worker.events() == rows


def test_an_orderly_end_replaces_the_journal(tmp_path: Path) -> None:
    Journal(tmp_path, most_steps=1).append(step(0))
    worker = WorkerFolder(tmp_path)
    worker.write_events([{"step": 7, "kind": "step"}])
    assert not any(path.exists() for path in journal_paths(tmp_path))
    Journal(tmp_path).append(step(1))
    worker.finalize_events()
    assert [row["step"] for row in worker.events()] == [7]
    assert not any(path.exists() for path in journal_paths(tmp_path))
