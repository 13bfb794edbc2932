"""A hand-made study of three parts, one of which may fail, and helpers that read findings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagewright.studies import Answer, Figure, Findings, Part, PartContext, Results, Study
from stagewright.studies.framework.study import Summary
from stagewright.studies.framework.tables import study_table
from stagewright.studies.runner.folder import StudyFolder
from stagewright.table import Table

ENVIRONMENT = {"cores": [0, 1], "processor": "an abacus", "gpus": [], "versions": {"torch": "2.13.0"}}


def answer_to(findings: Findings, question: str) -> str:
    """The sentences of the answer whose question contains these words."""
    return " ".join(next(answer for answer in findings.answers if question in answer.question).sentences)


def table_rows(table: Table) -> list[dict[str, str]]:
    """The rows of a table by column name."""
    names = [column.name for column in table.columns]
    return [dict(zip(names, map(str, row), strict=True)) for row in table.rows]


def small_study(run: Callable[[str, PartContext], Any], options: dict[str, Any] | None = None) -> Study:
    """one ─► two, three; the data of each is what `run` returns for its name."""

    def conclude(results: Results) -> Findings:
        sentences = tuple(f"{name} is {results[name]}." for name in results)
        return Findings(
            summary=Summary(measured=f"{len(results)} numbers.", ideal="Three.", why="Some fail.", advice="Count."),
            tables=(study_table("All", ("part", "number"), [(name, str(results[name])) for name in results]),),
            answers=(Answer(question="What are the numbers?", sentences=sentences, tables=("All",)),),
            figures=(Figure(name="dots", caption="Dots.", draw=lambda path: path.write_text("drawn")),),
        )

    def part(name: str, *needs: str) -> Part:
        return Part(name=name, about=f"the part {name}", run=lambda context: run(name, context), needs=needs)

    return Study(
        name="stages",
        title="A small study",
        options={"model": "abacus"} if options is None else options,
        questions=("What are the numbers?",),
        parts=(part("one"), part("two", "one"), part("three")),
        conclude=conclude,
    )


@pytest.fixture
def new_folder(tmp_path: Path) -> Callable[[Study], StudyFolder]:
    """Creates a study's folder."""
    return lambda study: StudyFolder.create(
        tmp_path, study, command="stagewright study stages", environment=ENVIRONMENT
    )
