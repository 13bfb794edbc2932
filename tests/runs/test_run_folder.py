from __future__ import annotations

import dataclasses
import json
import threading
from datetime import datetime
from pathlib import Path

import pytest

from stagewright.errors import RunError, UnknownName, UsageError
from stagewright.runs import RunFolder
from stagewright.runs.run_folder import check_root, run_name
from stagewright.spec import Mesh, ModelSpec, Plan

PLAN = Plan(model=ModelSpec(name="deit-small"), batch=8, mesh=Mesh(pipeline=2), microbatches=2)
NOW = datetime(2026, 11, 15, 3, 15, 2)


def test_a_new_folder(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "deep" / "runs", PLAN, environment={"versions": {"torch": "2"}}, now=NOW)
    assert folder.name == "2026-11-15-031502-deit-small-pipeline-2"
    assert sorted(path.name for path in folder.path.iterdir()) == ["environment.json", "plan.toml", "workers"]
    assert folder.plan() == PLAN
    assert folder.environment()["versions"] == {"torch": "2"}
    assert folder.environment()["begun"].startswith("2026-11-15T03:15:02")
    assert folder.result() is None
    assert folder.workers() == ()
    assert RunFolder.open(folder.path) == folder


def test_environment_of_this_machine(tmp_path: Path) -> None:
    environment = RunFolder.create(tmp_path, PLAN).environment()
    assert {"begun", "processor", "cores", "memory_bytes", "gpus", "backends", "versions"} <= set(environment)
    assert {"python", "torch"} <= set(environment["versions"])


@pytest.mark.parametrize(
    ("model", "mesh", "name"),
    [
        ("mlp-mnist", "serial", "2026-11-15-031502-mlp-mnist-serial"),
        ("gpt-layers:16", "data=2,pipeline=4", "2026-11-15-031502-gpt-layers-16-data-2-pipeline-4"),
        ("hf:../a b/Ünit", "tensor=2", "2026-11-15-031502-hf-..-a-b-nit-tensor-2"),
        ("/", "tensor=2", "2026-11-15-031502-model-tensor-2"),
    ],
)
def test_names(model: str, mesh: str, name: str) -> None:
    plan = dataclasses.replace(PLAN, model=ModelSpec(name=model), mesh=Mesh.parse(mesh))
    assert run_name(plan, NOW) == name


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path: Path) -> None:
    found: list[RunFolder] = []
    threads = [
        threading.Thread(target=lambda: found.append(RunFolder.create(tmp_path, PLAN, environment={}, now=NOW)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = "2026-11-15-031502-deit-small-pipeline-2"
    assert sorted(folder.name for folder in found) == [wanted, *(f"{wanted}-again{n}" for n in range(1, 8))]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(folder.name for folder in found)


def test_a_folder_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        RunFolder.create(tmp_path, PLAN, environment={"x": object()})
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"can't create a run folder in .*file: .*; choose another --root"):
        RunFolder.create(tmp_path / "file", PLAN, environment={})


def test_the_resolved_plan_runs_again(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, PLAN, environment={})
    resolved = dataclasses.replace(PLAN, cuts=("layers.3",), devices=("cpu:0", "cpu:1"))
    folder.write_plan(resolved)
    assert RunFolder.open(folder.path).plan() == resolved


def test_result(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, PLAN, environment={})
    folder.finish("done", {"samples_per_s": 12.5})
    result = folder.result()
    assert result is not None
    assert (result.status, result.samples_per_s) == ("done", 12.5)
    assert datetime.fromisoformat(result.ended).tzinfo is not None
    folder.finish("failed", {"error": "worker 1 was killed"})
    assert json.loads((folder.path / "result.json").read_text())["error"] == "worker 1 was killed"
    assert not list(folder.path.glob(".*"))


def test_a_damaged_result_is_told(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, PLAN, environment={})
    (folder.path / "result.json").write_text("{")
    with pytest.raises(UsageError, match=r"result.json is not JSON"):
        folder.result()
    (folder.path / "result.json").write_text("[]")
    with pytest.raises(UsageError, match=r"must hold a JSON object, not a list"):
        folder.result()


@pytest.mark.parametrize(("error", "status"), [(UsageError("can't be"), "refused"), (RunError("was killed"), "failed")])
def test_what_was_refused_did_not_fail(error: Exception, status: str, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, PLAN, environment={})
    folder.finish_with_error(error)
    result = folder.result()
    assert result is not None
    assert (result.status, result.error) == (status, str(error))


def test_a_folder_that_is_no_run_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no plan.toml and contains no runs; .*stagewright compare"):
        RunFolder.open(tmp_path)
    with pytest.raises(UsageError, match=r"nowhere does not exist, and .* contains no runs; .*stagewright compare"):
        RunFolder.open(tmp_path / "nowhere")
    one = RunFolder.create(tmp_path / "runs", PLAN, environment={})
    with pytest.raises(UsageError, match=f"no plan.toml; its runs are in .*runs: name one, like .*{one.name}"):
        RunFolder.open(tmp_path)
    with pytest.raises(UsageError, match=f"no plan.toml; name one of its 1 runs, like .*{one.name}"):
        RunFolder.open(tmp_path / "runs")
    with pytest.raises(UsageError, match="is a file; name the run's folder"):
        RunFolder.open(one.path / "plan.toml")


def test_the_nearest_run_is_offered(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, PLAN, environment={}, now=NOW)
    with pytest.raises(UnknownName, match=f"did you mean '{folder.name}'"):
        RunFolder.open(tmp_path / folder.name.replace("deit", "diet"))
    with pytest.raises(UsageError):
        RunFolder.open(tmp_path / "nowhere" / "run")


@pytest.mark.parametrize("below", ["", "deep/runs"])
def test_a_root_that_can_not_be_written_is_refused_beforehand(tmp_path: Path, below: str) -> None:
    check_root(tmp_path / below)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    with pytest.raises(UsageError, match=r"can't create a run folder in /proc.*; choose another --root"):
        check_root(Path("/proc") / below)  # not even root may write there
