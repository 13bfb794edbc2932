"""Write the findings of a study into its folder: table.md, answers.md and figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stagewright.files.atomic import save_text
from stagewright.studies.framework.study import Answer, Findings, Study
from stagewright.studies.runner.folder import StudyFolder
from stagewright.table import Table


def write_findings(findings: Findings, study: Study, folder: StudyFolder) -> None:
    """Write tables, answers and figures."""
    head = _head(study, folder.about())
    save_text(head + tables_markdown(findings.tables), folder.path / "table.md")
    save_text(head + answers_markdown(findings.answers), folder.path / "answers.md")
    for figure in findings.figures:
        for suffix in (".svg", ".png"):
            figure.draw(folder.path / "figures" / f"{figure.name}{suffix}")


def tables_markdown(tables: Sequence[Table]) -> str:
    """Write tables as Markdown, each under its title."""
    return "".join(f"\n## {table.title}\n\n{_table_markdown(table)}" for table in tables)


def _table_markdown(table: Table) -> str:
    def line(cells: Sequence[object]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |\n"

    rule = "|" + "|".join("---:" if column.align == "right" else "---" for column in table.columns) + "|\n"
    text = line([column.name for column in table.columns]) + rule + "".join(line(row) for row in table.rows)
    return text + "".join(f"\n{note}\n" for note in table.notes)


def answers_markdown(answers: Sequence[Answer]) -> str:
    """Write each question with its sentences, one paragraph each."""
    return "".join(f"\n## {answer.question}\n\n" + "\n\n".join(answer.sentences) + "\n" for answer in answers)


def _head(study: Study, about: dict[str, Any]) -> str:
    """Write title, command, machine, versions and date."""
    environment = about["environment"]
    gpus = ", ".join(gpu["name"] for gpu in environment.get("gpus", ()))
    machine = f"{len(environment['cores'])} cores of {environment['processor']}" + (f", {gpus}" if gpus else "")
    versions = environment["versions"]
    own = f", stagewright {versions['stagewright']}" if "stagewright" in versions else ""
    return f"# {study.title}\n\n`{about['command']}`\n\n{machine}; torch {versions['torch']}{own}; {about['begun']}\n"
