from __future__ import annotations

from pathlib import Path

from made_runs import make_run
from stagewright.store.serial import serial_beside


def test_the_newest_serial_run_of_the_same_batch_is_found(tmp_path: Path) -> None:
    pipeline = make_run(tmp_path, "pipeline=2", number=5)
    assert serial_beside(pipeline) is None
    make_run(tmp_path, number=0)
    newest = make_run(tmp_path, number=1)
    make_run(tmp_path, dtype="bfloat16", number=2)
    make_run(tmp_path, name="mlp-mnist", number=3)
    failed = make_run(tmp_path, number=4)
    failed.finish("failed", {"error": "killed"})
    broken = make_run(tmp_path, number=6)
    (broken.path / "plan.toml").write_text("not a plan")
    found = serial_beside(pipeline)
    assert found is not None
    assert found.name == newest.name
