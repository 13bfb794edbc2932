"""Parts run once, are saved at once, fail alone, and a study goes on where it was interrupted."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.studies.conftest import small_study

from stagewright.errors import RunError, RunTerminated, UsageError
from stagewright.runs.result import RunResult
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Mesh, ModelSpec, Plan
from stagewright.studies import Findings, PartContext, Results, Study, run_study
from stagewright.studies.runner.check import check_study_inputs
from stagewright.studies.runner.folder import StudyFolder
from stagewright.studies.runner.load import choose_study
from stagewright.studies.runner.neighbors import announced, find_neighbors
from stagewright.studies.runner.run import ALONE, DISTURBED, MISSING

NewFolder = Callable[[Study], StudyFolder]


def test_all_parts_run_in_order_and_are_saved(new_folder: NewFolder) -> None:
    order = []

    def run(name: str, context: PartContext) -> int:
        order.append((name, dict(context.results)))
        return len(order)

    study = small_study(run)
    folder = new_folder(study)
    outcome = run_study(study, folder)
    assert order == [("one", {}), ("two", {"one": 1}), ("three", {"one": 1, "two": 2})]
    assert dict(outcome.results) == {"one": 1, "two": 2, "three": 3}
    assert json.loads((folder.path / "parts/two.json").read_text())["data"] == 2
    assert folder.about()["status"] == "done"
    assert folder.about()["ended"] is not None
    assert "| two | 2 |" in (folder.path / "table.md").read_text()
    assert "## What are the numbers?\n\none is 1.\n\ntwo is 2." in (folder.path / "answers.md").read_text()
    assert "## Summary\n\n**Measured**: 3 numbers.\n\n**Ideal**: Three." in (folder.path / "answers.md").read_text()
    assert (folder.path / "figures/dots.svg").read_text() == "drawn"
    page = (folder.path / "report.html").read_text()
    assert page.index("3 numbers.") < page.index("What are the numbers?") < page.index("<caption>All</caption>")
    assert "A small study" in (folder.path / "report.html").read_text()
    assert "2 cores of an abacus" in (folder.path / "answers.md").read_text()


def test_an_interrupted_study_goes_on_with_what_is_missing(new_folder: NewFolder, tmp_path: Path) -> None:
    ran: list[str] = []

    def interrupted(name: str, context: PartContext) -> str:
        ran.append(name)
        if name == "two" and ran.count("two") == 1:
            raise KeyboardInterrupt
        return name

    study = small_study(interrupted)
    folder = new_folder(study)
    with pytest.raises(KeyboardInterrupt):
        run_study(study, folder)
    assert folder.about()["status"] == "interrupted"
    assert not (folder.path / "answers.md").exists()
    assert StudyFolder.unfinished(tmp_path, study) == folder
    assert StudyFolder.unfinished(tmp_path, small_study(interrupted, {"model": "other"})) is None
    assert run_study(study, folder).is_complete
    assert ran == ["one", "two", "two", "three"]
    assert StudyFolder.unfinished(tmp_path, study) is None


def test_a_part_that_fails_is_told_and_the_rest_goes_on(new_folder: NewFolder) -> None:
    told = []

    def failing(name: str, context: PartContext) -> str:
        if name == "one":
            raise RunError("worker 1 ran out of memory\n  at: somewhere")
        return name

    study = small_study(failing)
    folder = new_folder(study)
    outcome = run_study(study, folder, note=lambda part, text: told.append((part.name, text)))
    assert not outcome.is_complete
    assert dict(outcome.results) == {"three": "three"}
    assert outcome.findings.answers[-1].question == MISSING
    assert outcome.findings.answers[-1].sentences == (
        "the part one (one): worker 1 ran out of memory.",
        "the part two (two): skipped: it needs one, which failed.",
    )
    assert ("one", "failed: worker 1 ran out of memory") in told
    assert folder.about()["status"] == "incomplete"
    assert outcome.to_dict()["status"] == "incomplete"
    assert outcome.to_dict()["parts"][0]["error"].startswith("worker 1 ran out of memory")


def test_failed_parts_are_tried_again(new_folder: NewFolder) -> None:
    attempts: list[str] = []

    def once(name: str, context: PartContext) -> str:
        attempts.append(name)
        if name == "one" and len(attempts) == 1:
            raise ZeroDivisionError("division by zero")
        return name

    study = small_study(once)
    folder = new_folder(study)
    first = run_study(study, folder)
    assert first.results.failures["one"] == "ZeroDivisionError: division by zero"
    assert run_study(study, folder).is_complete
    assert attempts == ["one", "three", "one", "two"]


@pytest.mark.parametrize("bad", [float("nan"), {1, 2}, object()])
def test_what_is_not_json_is_a_failure(bad: Any, new_folder: NewFolder) -> None:
    study = small_study(lambda name, context: bad if name == "three" else 1)
    outcome = run_study(study, new_folder(study))
    assert list(outcome.results.failures) == ["three"]


def test_a_part_file_that_was_cut_off_is_made_again(new_folder: NewFolder) -> None:
    study = small_study(lambda name, context: name)
    folder = new_folder(study)
    run_study(study, folder)
    (folder.path / "parts/three.json").write_text('{"part": "three", "da')
    assert run_study(study, folder).results["three"] == "three"


def test_two_processes_do_not_share_a_folder(new_folder: NewFolder, tmp_path: Path) -> None:
    study = small_study(lambda name, context: name)
    folder = new_folder(study)
    with folder.held():
        assert StudyFolder.unfinished(tmp_path, study) is None
        with pytest.raises(UsageError, match="another process is running"):
            run_study(study, folder)
    assert StudyFolder.unfinished(tmp_path, study) == folder


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no study\.json"):
        StudyFolder.open(tmp_path)
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        StudyFolder.open(tmp_path)


def test_sigterm_ends_a_study_resumably(new_folder: NewFolder, tmp_path: Path) -> None:
    """In a part of its own, and in a run, whose launcher turns the signal into an error."""
    ran: list[str] = []

    def terminated(name: str, context: PartContext) -> str:
        ran.append(name)
        if ran == ["one"]:
            signal.raise_signal(signal.SIGTERM)
        if ran == ["one", "one", "two"]:
            raise RunTerminated("the run was ended by SIGTERM")
        return name

    study = small_study(terminated)
    folder = new_folder(study)
    before = signal.getsignal(signal.SIGTERM)
    for parts in (["one"], ["one", "one", "two"]):
        with pytest.raises(RunTerminated):
            run_study(study, folder)
        assert ran == parts, "no later part runs"
        assert folder.about()["status"] == "interrupted"
        assert StudyFolder.unfinished(tmp_path, study) == folder
    assert signal.getsignal(signal.SIGTERM) is before
    assert run_study(study, folder).is_complete


def test_sigterm_while_findings_are_written_interrupts_too(new_folder: NewFolder, tmp_path: Path) -> None:
    is_first = True

    def conclude(results: Results) -> Findings:
        nonlocal is_first
        if is_first:
            is_first = False
            signal.raise_signal(signal.SIGTERM)
        return study.conclude(results)

    study = small_study(lambda name, context: name)
    ended = replace(study, conclude=conclude)
    folder = new_folder(ended)
    with pytest.raises(RunTerminated):
        run_study(ended, folder)
    assert folder.about()["status"] == "interrupted"
    assert StudyFolder.unfinished(tmp_path, ended) == folder
    assert run_study(ended, folder).is_complete
    assert folder.about()["status"] == "done"


def test_sigterm_that_a_callback_swallows_is_sent_again(new_folder: NewFolder) -> None:
    def swallows(name: str, context: PartContext) -> str:
        with contextlib.suppress(RunTerminated):
            signal.raise_signal(signal.SIGTERM)
        time.sleep(30)
        return name

    study = small_study(swallows)
    folder = new_folder(study)
    begun_s = time.monotonic()
    with pytest.raises(RunTerminated):
        run_study(study, folder)
    assert time.monotonic() - begun_s < 20
    assert folder.about()["status"] == "interrupted"


def test_two_studies_on_the_same_cores_warn_each_other(new_folder: NewFolder, tmp_path: Path) -> None:
    first, second, other = (tmp_path / name for name in ("a", "b", "c"))
    registry = tmp_path / "registry"
    with announced(first, ("cpu:0", "cpu:1"), registry):
        (registry / "1.json").write_text(json.dumps({"folder": str(other), "devices": ["cpu:0-1"]}))
        (registry / "999999999.json").write_text(json.dumps({"folder": "/gone", "devices": ["cpu:0"]}))
        assert find_neighbors(first, ("cpu:1",), registry) == [str(other)]
        assert find_neighbors(second, ("cpu:0",), registry) == [str(other), str(first)]
        (registry / "1.json").write_text(json.dumps({"folder": str(other), "devices": ["cpu:1"]}))
        assert find_neighbors(first, ("cpu:0",), registry) == []
        (registry / "1.json").write_text(json.dumps({"folder": str(other), "devices": ["cpu:0"]}))
    assert find_neighbors(second, ("cpu:0",), registry) == [str(other)]


def test_a_warned_study_says_so(new_folder: NewFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagewright.studies.runner.run.find_neighbors", lambda folder, devices: ["/x/studies/other"])
    told = []
    study = small_study(lambda name, context: name)
    folder = new_folder(study)
    outcome = run_study(study, folder, note=lambda part, text: told.append(text))
    assert sum("another study is timing the same devices" in text for text in told) == 1
    assert outcome.findings.answers[0].question == ALONE
    assert "No: other timed the same devices meanwhile." in outcome.findings.answers[0].sentences[0]


@pytest.mark.parametrize("name", ["memory", "strategies"])
def test_a_memory_limit_that_nothing_fits_is_refused_before_anything_runs(name: str) -> None:
    study = choose_study(name, {"devices": ("cpu:0", "cpu:1"), "memory_bytes": 10**4}, quick=True)
    with pytest.raises(UsageError, match=r"--memory 9\.77 KiB: no strategy fits .* use more than that"):
        check_study_inputs(study)


def test_runs_have_the_names_of_their_parts(new_folder: NewFolder) -> None:
    attempts = [{"layers": 3, "run": "runs/c"}, {"layers": 4, "ran": False}]
    data = {"one": {"run": "runs/a"}, "two": {"attempts": attempts}, "three": 3}
    study = small_study(lambda name, context: data[name])
    folder = new_folder(study)
    run_study(study, folder)
    names = json.loads((folder.path / "findings.json").read_text())["runs"]
    assert names == {"a": "the part one", "c": "the part two, 3 layers"}


def test_what_was_repeated_is_an_answer(new_folder: NewFolder) -> None:
    again = {"samples_per_s": 21.0, "repeated": {"reason": "its steps varied by ±30 %", "samples_per_s": [20.0, 21.0]}}
    study = small_study(lambda name, context: again if name == "one" else name)
    answer = run_study(study, new_folder(study)).findings.answers[-1]
    assert answer.question == DISTURBED
    assert answer.sentences == (
        "the part one: its steps varied by ±30 %, so it was repeated: 20.0 then 21.0 samples/s; 21.0 counts.",
    )
    study = small_study(lambda name, context: name)
    assert run_study(study, new_folder(study)).findings.answers[-1].question != DISTURBED


def test_an_implausible_run_is_repeated_with_its_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([25.0, 10.0, 18.0])

    def run_plan(plan: Plan, root: Path, progress: object) -> RunResult:
        folder = RunFolder.create(root, plan, environment={})
        return RunResult(equal=True, samples_per_s=next(rates), run=str(folder.path))

    monkeypatch.setattr("stagewright.engine.jobs.compare.run_plan", run_plan)
    single = Plan(model=ModelSpec(name="mlp-mnist"), batch=4)
    (tmp_path / "runs").mkdir()
    serial = RunFolder.create(tmp_path / "runs", single, environment={})
    results = Results({"serial": {"samples_per_s": 8.0, "run": f"runs/{serial.path.name}"}})
    context = PartContext(folder=tmp_path, results=results)
    row = context.run(replace(single, mesh=Mesh(data=2)), baselines=("serial",))
    assert (row["samples_per_s"], row["baseline_samples_per_s"]) == (18.0, 10.0)
    assert row["repeated"]["samples_per_s"] == [25.0, 18.0]
    assert len(list((tmp_path / "left-out").iterdir())) == 1
    assert (tmp_path / row["run"]).is_dir()
