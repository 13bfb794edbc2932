"""The faults that are injected: seeded, balanced, and continued from a record."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest


def test_faults_are_seeded_and_cover_kinds_moments_and_plans() -> None:
    from faults import choose_faults
    from injection import KINDS, MOMENTS, PLANS

    chosen = choose_faults(200, 0)
    assert chosen == choose_faults(200, 0) != choose_faults(200, 1)
    assert len({(fault["kind"], fault["moment"], fault["plan"]) for fault in chosen}) == 200
    counts = Counter(fault["kind"] for fault in chosen)
    assert set(counts) == set(KINDS)
    assert 11 <= min(counts.values()) <= max(counts.values()) <= 12
    for kind in KINDS:
        same = [fault for fault in chosen if fault["kind"] == kind]
        assert {fault["moment"] for fault in same} == set(MOMENTS)
        assert {fault["plan"] for fault in same} == set(PLANS)
        assert {fault["worker"] for fault in same} == {0, 1}


def test_parts_cover_all_faults_once() -> None:
    from faults import choose_numbers

    assert choose_numbers("3-5,17", "1/1", 200) == [3, 4, 5, 17]
    parts = [choose_numbers("", f"{part}/3", 200) for part in (1, 2, 3)]
    assert sorted(number for part in parts for number in part) == list(range(200))


def test_lanes_have_cores_of_their_own_and_run_each_fault_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A lane that ends early loses its fault alone; none begins when the time is over."""
    from injection import lanes

    assert lanes.share_cores(range(16), 3) == [[*range(5)], [*range(5, 10)], [*range(10, 16)]]
    assert lanes.share_cores([4, 6], 5) == [[4], [6]]
    program = "import sys\nfor line in sys.stdin:\n  if '13' in line: sys.exit(7)\n  print(line, end='', flush=True)"
    monkeypatch.setattr(
        lanes,
        "_start_lane",
        lambda *told: subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ),
    )
    rows: list[int] = []
    faults = [{"number": number} for number in range(10, 16)]
    lanes.run_lanes(faults, 2, 10.0, tmp_path, lambda row: rows.append(row["number"]), lambda: len(rows) == 4)
    assert sorted(rows)[:3] == [10, 11, 12]
    assert 4 <= len(rows) <= 5, "two lanes: one more may have begun"
    assert "fault 13: its lane ended with exit code 7" in capsys.readouterr().err


def test_a_record_is_continued_and_wrong_rows_are_run_again(tmp_path: Path) -> None:
    from faults import read_rows

    path = tmp_path / "faults.json"
    assert read_rows(path, 0) == {}
    rows = [{"number": 4, "ok": True}, {"number": 7, "ok": False}, {"number": 9, "ok": True, "machine": "b"}]
    path.write_text(json.dumps({"seed": 3, "machine": "a", "rows": rows}))
    assert read_rows(path, 3) == {
        4: {"number": 4, "ok": True, "machine": "a"},
        9: {"number": 9, "ok": True, "machine": "b"},
    }
    assert read_rows(path, 0) == {}


def test_summary_counts_the_runs_that_ended_as_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    from faults import summarize

    row = {"kind": "SIGKILL", "end_s": 2.0, "ok": True, "resumed": True}
    summarize([row, {**row, "end_s": 4.0, "ok": False}, {**row, "kind": "SIGSTOP", "end_s": 10.4, "resumed": False}])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["SIGKILL", "2", "1", "4.0", "s,", "4.0", "s", "2"]
    assert lines[2] == ["SIGSTOP", "1", "1", "10.4", "s,", "10.4", "s", "0"]
    assert lines[3][:3] == ["2", "of", "3"]
