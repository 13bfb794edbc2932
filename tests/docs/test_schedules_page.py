"""docs/schedules.md shows the actions that the engine executes."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from stagewright.schedules.rules import SCHEDULES

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "make_schedules_page.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_page_is_current(script: dict[str, Any]) -> None:
    written = script["PAGE"].read_text(encoding="utf-8")
    assert written == script["schedules_page"](), "run: python docs/make_schedules_page.py"


def test_diagram_of_1f1b(script: dict[str, Any]) -> None:
    assert script["diagram"](script["simulate"]("1f1b", 2, 2)).splitlines() == [
        "worker 0   F0─── F1───             B0─────────       B1─────────",
        "worker 1         F0─── B0───────── F1─── B1─────────",
    ]


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_step_length_follows_the_formula(script: dict[str, Any], num_workers: int) -> None:
    """A step of m micro-batches takes (m + (p - 1) / v) · 6 ticks with whole backwards."""
    m = 2 * num_workers
    for schedule in ("gpipe", "1f1b", "interleaved", "looped-bfs"):
        rounds = SCHEDULES[schedule].stages_per_worker
        assert script["simulate"](schedule, num_workers, m).ticks == 6 * m + 6 * (num_workers - 1) // rounds
    for schedule in ("interleaved-zero-bubble", "zbv", "dualpipev"):
        assert script["simulate"](schedule, num_workers, m).ticks < 6 * m + 3 * (num_workers - 1)


def test_micro_batches_in_flight(script: dict[str, Any]) -> None:
    assert script["simulate"]("1f1b", 4, 16).in_flight == (4, 3, 2, 1)
    assert script["simulate"]("gpipe", 4, 16).in_flight == (16, 16, 16, 16)


def test_a_searched_order_is_shorter_at_the_same_memory(script: dict[str, Any]) -> None:
    """With equal workers it is as long as the warm-up and all work; with unequal ones no schedule is as short."""
    assert (script["simulate"]("searched", 2, 4).ticks, script["simulate"]("searched", 2, 4).in_flight) == (26, (2, 2))
    rows = {name: (ticks, in_flight) for name, ticks, in_flight in script["unequal_rows"]()}
    searched = {name: row for name, row in rows.items() if "searched" in name}
    fixed = [row for name, row in rows.items() if name not in searched]
    for ticks, in_flight in searched.values():
        assert 73 <= ticks < min(length for length, _ in fixed)
        assert in_flight <= 8
    assert rows["`searched`, memory for 4"][1] == 4
