from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from made_runs import make_run, make_training
from stagewright.errors import UnknownName, UsageError
from stagewright.report.page.content.runs import differences, find_folders, read_runs
from stagewright.runs import RunFolder
from stagewright.runs.result import RunResult
from stagewright.spec import Mesh, ModelSpec, Plan


def test_a_folder_of_runs_is_all_its_runs(tmp_path: Path) -> None:
    made = [make_run(tmp_path, number=0), make_run(tmp_path, "data=2", number=1)]
    (tmp_path / "notes").mkdir()
    assert [one.path for one in find_folders([tmp_path]).runs] == [one.path for one in made]
    assert len(find_folders([tmp_path, made[0].path]).runs) == 2, "named twice, shown once"
    assert [one.path for one in find_folders([made[1].path, made[0].path]).runs] == [made[1].path, made[0].path]


def test_a_study_brings_its_runs(tmp_path: Path) -> None:
    folder = tmp_path / "2026-11-15-stages"
    folder.mkdir()
    (folder / "study.json").write_text("{}")
    run = make_run(folder / "runs")
    folders = find_folders([folder])
    assert folders.studies == (folder,)
    assert [found.path for found in folders.runs] == [run.path]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(UnknownName, match="did you mean '2026-11-15-031502-digits-vit-serial'"):
        find_folders([run.path.with_name("2026-11-15-031502-digits-vit-serail")])
    with pytest.raises(UsageError, match=r"plan\.toml is a file; name the run's folder: .*digits-vit-serial"):
        find_folders([run.path / "plan.toml"])
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UsageError, match=r"there is no run in .*empty; make one with: stagewright compare"):
        find_folders([empty])


def test_a_damaged_run_is_left_out_of_a_folder_and_refused_by_name(tmp_path: Path) -> None:
    good, bad = make_run(tmp_path, number=0), make_run(tmp_path, "data=2", number=1)
    (bad.path / "plan.toml").write_text("batch = 0\n")
    folders = find_folders([tmp_path])
    assert [run.path for run in folders.runs] == [good.path]
    assert len(folders.damaged) == 1
    assert "plan.toml" in folders.damaged[0]
    with pytest.raises(UsageError, match=r"plan\.toml"):
        find_folders([bad.path])


def test_speed_up_is_over_the_serial_run_on_the_page_or_beside(tmp_path: Path) -> None:
    serial = make_run(tmp_path, step_s=0.1)
    pipeline = make_run(tmp_path, "pipeline=2", step_s=0.08, number=1)
    assert read_runs([pipeline])[0].speedup == pytest.approx(1.25)
    both = read_runs([serial, pipeline])
    assert [run.speedup for run in both] == pytest.approx([1.0, 1.25])
    elsewhere = make_run(tmp_path / "other", "pipeline=2", step_s=0.08)
    assert read_runs([elsewhere])[0].speedup is None
    wrong = make_run(tmp_path, "pipeline=2", step_s=0.08, equal=False, number=2)
    assert read_runs([serial, wrong])[1].speedup is None, "what is not equal has no speed-up"


def test_each_run_is_set_against_its_own_comparison(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path, step_s=0.1, number=0),
        make_run(tmp_path, "pipeline=2", step_s=0.08, number=1),
        make_run(tmp_path, step_s=0.2, number=2),
        make_run(tmp_path, "pipeline=2", step_s=0.08, number=3),
        make_run(tmp_path, step_s=0.4, precision="bf16", number=4),
        make_run(tmp_path, "pipeline=2", step_s=0.1, precision="bf16", number=5),
    ]
    read = read_runs(runs)
    assert [run.speedup for run in read] == pytest.approx([1.0, 1.25, 1.0, 2.5, 1.0, 4.0])
    assert [run.baseline for run in read] == [read[index].label for index in (0, 0, 2, 2, 4, 4)]
    assert read_runs(runs[3:4])[0].baseline == runs[2].name, "one that is not on the page goes by its folder"


def test_of_many_runs_the_newest_are_shown(tmp_path: Path) -> None:
    made = [make_run(tmp_path, steps=1, events=False, number=number) for number in range(3)]
    folders = find_folders([made[2].path, made[0].path, made[1].path], newest=2)
    assert [run.path for run in folders.runs] == [made[2].path, made[1].path], "in the order in which they were named"
    assert folders.left_out == (
        "the newest 2 of 3 runs are shown and 1 older ones are left out: use --newest 3, or name runs"
    )
    assert find_folders([tmp_path]).left_out == ""


def test_labels_tell_runs_apart(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path, number=0),
        make_run(tmp_path, "pipeline=2", number=1),
        make_run(tmp_path, "pipeline=2", microbatches=8, number=2),
        make_run(tmp_path, "pipeline=2", microbatches=8, number=3),
        make_run(tmp_path, "pipeline=2", microbatches=8, schedule="gpipe", number=4),
    ]
    assert [run.label for run in read_runs(runs)] == [
        "serial",
        "pipeline=2, 2 micro-batches, 1f1b",
        "pipeline=2, 8 micro-batches, 1f1b",
        "pipeline=2, 8 micro-batches, 1f1b #2",
        "pipeline=2, 8 micro-batches, gpipe",
    ]
    several = read_runs([runs[0], make_training(tmp_path)])
    assert [run.label for run in several] == ["digits-vit, serial", "mlp-mnist, digits, serial"]


def test_differences_of_plans() -> None:
    plan = Plan(model=ModelSpec(name="mlp-mnist"), batch=8)
    other = Plan(model=ModelSpec(name="mlp-mnist"), batch=8, mesh=Mesh(pipeline=2), cuts=("fc1",), memory_bytes=2**30)
    differ, same = differences([plan, other])
    assert differ == ["cuts", "mesh.pipeline", "memory"]
    assert "batch" in same
    assert differences([plan])[0] == []


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    old = make_run(tmp_path, events=False)
    (run,) = read_runs([old])
    assert run.trace is None
    assert run.memory == ()
    assert "has no events of worker 0; run its plan again" in run.missing["trace"]
    plan = Plan(model=ModelSpec(name="mlp-mnist"), batch=8)
    going = RunFolder.create(tmp_path, plan, environment={}, now=datetime(2026, 11, 15, 9))
    (run,) = read_runs([going])
    assert (run.status, run.result, run.speedup, run.metrics) == ("unfinished", RunResult(), None, ())
