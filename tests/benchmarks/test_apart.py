from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys
sys.path.insert(0, {benchmarks!r})
from apart import apart_parser, run_apart

def measure(about, device):
    print("what a library has to say")
    if about["number"] == 2:
        raise ValueError("no room")
    return {{"on": device, "twice": 2 * about["number"]}}

if __name__ == "__main__":
    run_apart(apart_parser("").parse_args(), [], measure, print)
"""


def test_plans_run_in_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = importlib.import_module("apart")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(benchmarks=str(Path(apart.__file__).parents[1])))
    monkeypatch.setattr(sys, "argv", [str(script), "--device", "cpu:0", "--only", "0,2"])
    found: dict[int, dict[str, Any]] = {}
    plans = [{"number": number} for number in range(3)]
    apart.run_apart(
        apart.apart_parser("").parse_args(),
        plans,
        lambda *_: {},
        lambda about, one: found.update({about["number"]: one}),
    )
    assert found[0] == {"on": "cpu:0", "twice": 0}
    assert "no room" in found[2]["error"]
    assert set(found) == {0, 2}


def test_without_a_gpu_one_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    apart = importlib.import_module("apart")
    monkeypatch.setattr(apart, "has_gpu", lambda: False)
    options = apart.apart_parser("").parse_args([])
    with pytest.raises(SystemExit) as ended:
        apart.run_apart(options, [{}], lambda *_: {}, lambda *_: None)
    assert not ended.value.code
    assert "--device cpu:0 tries it on a core" in capsys.readouterr().out
