"""Commands of the lab pages, and ``benchmarks/lab_times.py``, which times them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from stagewright.studies.framework.options import declared_options
from stagewright.studies.runner.load import STUDIES, options_class

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from lab_times import PAGES, estimate, quick_words, read_commands, read_study


def test_all_questions_of_the_sheets_have_a_command() -> None:
    rows = [
        line
        for name in STUDIES
        for line in (PAGES / f"{name}.md").read_text(encoding="utf-8").partition("\n## Questions\n")[2].splitlines()
        if line.startswith("| ") and not line.startswith("| question")
    ]
    questions = [row for row in rows if row.split(" | ")[0].endswith("?")]
    assert len(questions) >= 35
    assert len({row.split(" | ")[0] for row in questions}) == len(questions)


@pytest.mark.parametrize("command", read_commands())
def test_commands_have_options_that_exist(command: str) -> None:
    _, name, *_ = command.split()
    flags = {
        info.flag or "--" + field.replace("_", "-")
        for field, (_, info) in declared_options(options_class(name)).items()
    }
    assert set(re.findall(r"--[a-z-]+", command)) <= {part for flag in flags for part in flag.split("/")}


def test_commands_are_run_quickly_with_data_where_they_need_it() -> None:
    assert quick_words("study memory", has_data=False) == ["study", "memory", "--quick"]
    assert quick_words("study strategies --tasks rte --batch 32,64", has_data=False) is None
    assert quick_words("study strategies --tasks rte", has_data=True) == [
        *("study", "strategies", "--tasks", "rte", "--quick")
    ]
    assert quick_words("study strategies --tasks cifar10 --model resnet-101", has_data=True) is None
    client = quick_words("study strategies --client f4l3,f1l1", has_data=True)
    assert client is not None
    assert client[-2:] == ["--tasks", "cifar10"]


def test_a_command_is_estimated_from_parts_that_were_measured() -> None:
    study = read_study(["study", "memory", "--quick"])
    seconds = {part.name: 2.0 for part in study.parts}
    assert estimate(study, seconds) == 2.0 * len(study.parts)
    assert estimate(study, {name: value for name, value in seconds.items() if name != "run-data-1"}) == 2.0 * len(
        seconds
    )
    assert estimate(study, {"run-data-1": 2.0}) is None, "nothing is known of fits"
