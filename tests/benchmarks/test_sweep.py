"""Sweeps over cells: results as they come, a process that ends, the limit of time, cells that a log has."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ANSWERS = """
import json, os, sys
for line in sys.stdin:
    family, plan = json.loads(line)
    if family == "crash":
        os._exit(7)
    print(json.dumps({"family": family, "plan": plan, "verdict": "equal"}), flush=True)
"""
COMMAND = [sys.executable, "-S", "-c", ANSWERS]


def test_each_cell_is_run_once_and_a_process_that_ends_is_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    from families.sweep import run_cells

    cells = [("bert", "data"), ("crash", "data"), ("gpt2", "data"), ("vit", "stream")]
    results: list[dict[str, Any]] = []
    run_cells(cells, [COMMAND, COMMAND], results.append, None)
    assert sorted((result["family"], result["plan"]) for result in results) == [
        ("bert", "data"),
        ("gpt2", "data"),
        ("vit", "stream"),
    ]
    assert capfd.readouterr().err == "crash (data): the process ended with code 7\n"


def test_no_cell_starts_after_the_limit(capfd: pytest.CaptureFixture[str]) -> None:
    from families.sweep import run_cells

    results: list[dict[str, Any]] = []
    run_cells([("bert", "data")], [COMMAND], results.append, 0)
    assert results == []
    assert capfd.readouterr().err == "1 cells were not run within 0 s\n"


def test_old_cells_that_no_log_has_are_selected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import engine_families
    from families.sweep import read_lines

    old, new = {"run": "2026-11-17 or before; 16 cores"}, {"run": "2026-11-18; 2 cores"}
    rows = {family.name: dict.fromkeys(engine_families.PLANS, new) for family in engine_families.FAMILIES}
    rows["bert"] = {**rows["bert"], "data": old, "stream": old}
    monkeypatch.setattr(engine_families, "load_rows", lambda: rows)
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"family": "bert", "plan": "data", "verdict": "equal"}) + "\n", encoding="utf-8")
    assert list(read_lines([log])) == [(("bert", "data"), {"verdict": "equal"})]
    options = argparse.Namespace(only=None, plans=None, older_than="2026-11-18", skip=[log])
    assert engine_families.select_cells(options) == [("bert", "stream")]
