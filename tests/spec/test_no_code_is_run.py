"""Reading what others wrote runs none of their code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stagewright.errors import UsageError
from stagewright.report.live.tail import RunTail
from stagewright.runs.index import RunIndex
from stagewright.spec import Plan, read_plan, write_plan
from stagewright.spec.local_check import check_user_code

_TRAP = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\nraise SystemExit(0)\n"


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a module of the current directory that leaves a file when it is imported, and exits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "trapped_train.py").write_text(_TRAP)
    return tmp_path / "trapped_train.ran"


_PLANS = [
    Plan.of("digits-vit", 8, "pipeline=2", microbatches=2, split="trapped_train:policy"),
    Plan.of("digits-vit", 8, "pipeline=2", microbatches=2, codec="trapped_train:Codec"),
    Plan.of("digits-vit", 8, "pipeline=2", microbatches=2, codec="delta(trapped_train:Codec)"),
    Plan.of("trapped_train:factory", 8),
]


@pytest.mark.parametrize("plan", _PLANS, ids=["split", "codec", "inner codec", "model"])
def test_reading_a_plan_imports_nothing(plan: Plan, trap: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "2026-11-15-031502-digits-vit"
    (run / "workers").mkdir(parents=True)
    write_plan(plan, run / "plan.toml")
    assert read_plan(run / "plan.toml") == plan
    with RunIndex(tmp_path / "runs") as index:
        assert [row.status for row in index.rows()] == ["unfinished"]
    assert RunTail(tmp_path / "runs").poll().plan == plan
    assert not trap.exists()


@pytest.mark.parametrize("plan", _PLANS[:3], ids=["split", "codec", "inner codec"])
def test_a_plan_that_runs_imports_its_code_and_an_exit_in_it_is_an_error(plan: Plan, trap: Path) -> None:
    with pytest.raises(UsageError, match=r"module 'trapped_train' does not import: SystemExit: 0"):
        check_user_code(plan)
    assert trap.exists()


@pytest.mark.parametrize("name", ["a b:c", "a:b c", "os;x:y", "a..b:c", "\x1b[2J:x", "x:\x1bx"])
def test_a_name_that_is_no_python_name_is_refused_when_the_plan_is_read(name: str) -> None:
    with pytest.raises(UsageError):
        write_and_read(Plan.of("digits-vit", 8, "pipeline=2", microbatches=2, split=name))


def write_and_read(plan: Plan) -> Plan:
    from stagewright.spec.plan_file import plan_from_table, plan_to_table

    return plan_from_table(plan_to_table(plan))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"mesh": "data=3000000"}, "3000000 workers, but a plan has at most 131072"),
        ({"mesh": "pipeline=2", "stages": 10**6, "schedule": "interleaved"}, "at most 16384"),
        ({"mesh": "serial", "microbatches": 10**7}, "at most 1048576"),
    ],
)
def test_sizes_have_limits(keys: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        write_and_read(Plan.of("digits-vit", 10**9, **keys))  # type: ignore[arg-type]
