from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys
sys.path.insert(0, {benchmarks!r})
from isolated_runs import isolated_parser, run_isolated

def measure(settings, device):
    print("output of a library")
    if settings["number"] == 2:
        raise ValueError("no room")
    return {{"on": device, "twice": 2 * settings["number"]}}

if __name__ == "__main__":
    run_isolated(isolated_parser("").parse_args(), [], measure, print)
"""


def test_plans_run_in_separate_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolated_runs = importlib.import_module("isolated_runs")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(benchmarks=str(Path(isolated_runs.__file__).parents[1])))
    monkeypatch.setattr(sys, "argv", [str(script), "--device", "cpu:0", "--only", "0,2"])
    results: dict[int, dict[str, Any]] = {}
    plans = [{"number": number} for number in range(3)]
    isolated_runs.run_isolated(
        isolated_runs.isolated_parser("").parse_args(),
        plans,
        lambda *_: {},
        lambda settings, result: results.update({settings["number"]: result}),
    )
    assert results[0] == {"on": "cpu:0", "twice": 0}
    assert "no room" in results[2]["error"]
    assert set(results) == {0, 2}


def test_gpu_plans_are_skipped_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    isolated_runs = importlib.import_module("isolated_runs")
    monkeypatch.setattr(isolated_runs, "has_gpu", lambda: False)
    options = isolated_runs.isolated_parser("").parse_args([])
    with pytest.raises(SystemExit) as ended:
        isolated_runs.run_isolated(options, [{}], lambda *_: {}, lambda *_: None)
    assert not ended.value.code
    assert "--device cpu:0 tests it on a core" in capsys.readouterr().out
