from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from made_runs import make_run
from stagewright.runs.baseline import find_baseline


def test_the_serial_run_of_the_same_comparison_is_found(tmp_path: Path) -> None:
    early = make_run(tmp_path, "pipeline=2", number=5)
    assert find_baseline(early) is None
    make_run(tmp_path, number=0)
    own = make_run(tmp_path, number=1)
    make_run(tmp_path, precision="bf16", number=2)
    make_run(tmp_path, name="mlp-mnist", number=3)
    failed = make_run(tmp_path, number=4)
    failed.finish("failed", {"error": "killed"})
    broken = make_run(tmp_path, number=6)
    (broken.path / "plan.toml").write_text("not a plan")
    later = make_run(tmp_path, number=7)
    late = make_run(tmp_path, "pipeline=2", number=8)
    for run, serial in ((early, own), (late, later), (own, own)):
        found = find_baseline(run)
        assert found is not None
        assert found.folder.name == serial.name


def test_a_serial_run_after_it_is_better_than_none(tmp_path: Path) -> None:
    pipeline = make_run(tmp_path, "pipeline=2", number=0)
    first = make_run(tmp_path, number=1)
    make_run(tmp_path, number=2)
    found = find_baseline(pipeline)
    assert found is not None
    assert found.folder.name == first.name


def test_other_devices_and_machines_are_not_compared(tmp_path: Path) -> None:
    pipeline = make_run(tmp_path, "pipeline=2", number=1)
    serial = make_run(tmp_path, number=0)
    wide = serial.plan()
    serial.write_plan(replace(wide, devices=("cpu:0-1",)))
    assert find_baseline(pipeline) is None
    pipeline.write_plan(replace(pipeline.plan(), devices=("cpu:4094,4096", "cpu:4097-4098")))
    assert find_baseline(pipeline) is not None, "two cores each, of a machine with more of them than any"
    pipeline.write_plan(replace(pipeline.plan(), devices=("cpu:0", "cpu:1")))
    serial.write_plan(wide)
    assert find_baseline(pipeline) is not None
    environment = {**serial.environment(), "processor": "Another"}
    (serial.path / "environment.json").write_text(json.dumps(environment))
    assert find_baseline(pipeline) is None


def test_a_recomputed_serial_run_is_not_the_baseline(tmp_path: Path) -> None:
    plain = make_run(tmp_path, number=0, step_s=0.1)
    recomputed = make_run(tmp_path, number=1, step_s=0.15, recompute="always")
    data = make_run(tmp_path, "data=2", number=2, step_s=0.06)
    for run in (data, recomputed, plain):
        found = find_baseline(run)
        assert found is not None
        assert found.folder.name == plain.name, "the slower single-device plan began last, and does not count"
    make_run(tmp_path, number=3, step_s=0.11)
    slow = make_run(tmp_path, number=4, step_s=0.5)
    found = find_baseline(make_run(tmp_path, "tensor=2", number=5, step_s=0.06))
    assert found is not None
    assert found.folder.name == slow.name, "of the fastest plan, the run of the same round"


def test_one_cold_step_is_not_a_baseline(tmp_path: Path) -> None:
    make_run(tmp_path, number=0, step_s=0.01, steps=1, warmup=0)
    assert find_baseline(make_run(tmp_path, "data=2", number=1)) is None
