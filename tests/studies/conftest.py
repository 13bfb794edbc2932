"""A study that is made by hand: three parts, one of which may fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagewright.studies import Answer, PartContext, Figure, Findings, Part, Results, Study, Table
from stagewright.studies.runner.folder import StudyFolder

ENVIRONMENT = {"cores": [0, 1], "processor": "an abacus", "gpus": [], "versions": {"torch": "2.13.0"}}


def small_study(run: Callable[[str, PartContext], Any], options: dict[str, Any] | None = None) -> Study:
    """one ─► two, three; each is what `run` makes of its name."""

    def conclude(results: Results) -> Findings:
        found = tuple(f"{name} is {results[name]}." for name in results)
        return Findings(
            tables=(Table(title="All", columns=("part", "number"), rows=tuple((n, str(results[n])) for n in results)),),
            answers=(Answer(question="What was found?", sentences=found),),
            figures=(Figure(name="dots", caption="Dots.", draw=lambda path: path.write_text("drawn")),),
        )

    def part(name: str, *needs: str) -> Part:
        return Part(name=name, about=f"the part {name}", run=lambda context: run(name, context), needs=needs)

    return Study(
        name="stages",
        title="A small study",
        options={"model": "abacus"} if options is None else options,
        questions=("What was found?",),
        parts=(part("one"), part("two", "one"), part("three")),
        conclude=conclude,
    )


@pytest.fixture
def new_folder(tmp_path: Path) -> Callable[[Study], StudyFolder]:
    """Makes a study's folder."""
    return lambda study: StudyFolder.create(
        tmp_path, study, command="stagewright study stages", environment=ENVIRONMENT
    )
