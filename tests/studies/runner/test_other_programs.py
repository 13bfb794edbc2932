"""CPU time of other programs: counted from /proc, and said at the top of a study's summary."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.studies.conftest import small_study

from stagewright.studies import Results, Study, run_study
from stagewright.studies.parts.measurements import is_busy, noise_margin, with_other_load
from stagewright.studies.runner.folder import StudyFolder
from stagewright.studies.runner.other_programs import other_load, read_other_cpu_s

TICKS = os.sysconf("SC_CLK_TCK")


def fake_proc(root: Path, processes: dict[int, tuple[int, int]], steal: int = 0) -> Path:
    """A /proc with processes: their parent, and their CPU seconds."""
    for pid, (parent, seconds) in processes.items():
        (root / str(pid)).mkdir()
        before = "0 " * 9  # pgrp to cmajflt
        (root / str(pid) / "stat").write_text(f"{pid} (a (b) c) S {parent} {before}{seconds * TICKS} 0 0 0 20 0\n")
    (root / "stat").write_text(f"cpu 1 2 3 4 5 6 7 {steal * TICKS} 0 0\ncpu0 1\n")
    return root


def test_only_processes_outside_the_own_tree_count(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path, {1: (0, 5), 20: (1, 7), 21: (20, 100), 22: (21, 100), 30: (1, 2)}, steal=3)
    assert read_other_cpu_s(proc, own=21) == 5 + 7 + 2 + 3
    assert read_other_cpu_s(tmp_path / "nowhere", own=21) is None


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_this_process_is_no_other_program() -> None:
    while sum(os.times()[:2]) < 0.5:  # so that it has used some time
        pass
    others, everything = read_other_cpu_s(), read_other_cpu_s(own=-1)
    assert others is not None
    assert everything is not None
    assert everything - others >= 0.4


def test_load_is_relative_to_the_cores_of_the_study() -> None:
    cores = os.cpu_count() or 1
    parts = [{"seconds": 10.0, "other_cpu_s": 10.0 * cores}, {"seconds": 10.0, "other_cpu_s": 0.0}, {"seconds": 5.0}]
    everywhere = [f"cpu:{core}" for core in range(cores)]
    assert other_load(parts, everywhere) == pytest.approx(0.5), "parts of older versions do not count"
    assert other_load(parts, ()) == pytest.approx(0.5)
    assert other_load(parts, ("cuda:0", "cuda:1")) is None
    if cores > 1:
        idle = [{"seconds": 10.0, "other_cpu_s": 10.0 * (cores - 1)}]
        assert other_load(idle, ("cpu:0",)) == 0.0, "there were other cores for them"


def test_a_busy_machine_widens_the_margin() -> None:
    quiet = Results({"calibration": {"noise": 0.02}})
    assert (noise_margin(quiet), is_busy(quiet)) == (0.05, False)
    busy = with_other_load(quiet, 0.5)
    assert (noise_margin(busy), is_busy(busy)) == (1.0, True), "a run may have had a core, and another half of one"
    assert with_other_load(quiet, None) is quiet


@pytest.mark.parametrize(("share", "is_said"), [(0.6, True), (0.05, False)])
def test_the_summary_says_that_other_programs_ran(
    new_folder: Callable[[Study], StudyFolder], share: float, is_said: bool
) -> None:
    study = small_study(lambda name, context: name)
    folder = new_folder(study)
    for part in study.parts:
        other_s = 10.0 * share * (os.cpu_count() or 1)
        folder.save_part(part.name, seconds=10.0, data=part.name, other_cpu_s=other_s)
    outcome = run_study(study, folder)
    text = (folder.path / "answers.md").read_text()
    assert ("**Caution**: Other programs took 60 % of the cores' time while this ran." in text) == is_said
    assert ("other programs took" in (folder.path / "report.html").read_text().lower()) == is_said
    assert "other-load" not in outcome.results
