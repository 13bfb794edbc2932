"""What a study concludes, as files in its folder: table.md, answers.md and figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stagewright.files.atomic import save_text
from stagewright.studies.runner.folder import StudyFolder
from stagewright.studies.framework.study import Answer, Findings, Study, Table

__all__ = ["answers_markdown", "table_markdown", "tables_markdown", "write_findings"]


def write_findings(findings: Findings, study: Study, folder: StudyFolder) -> None:
    """Write everything that is concluded."""
    head = _head(study, folder.about())
    save_text(head + tables_markdown(findings.tables), folder.path / "table.md")
    save_text(head + answers_markdown(findings.answers), folder.path / "answers.md")
    for drawing in findings.drawings:
        for suffix in (".svg", ".png"):
            drawing.draw(folder.path / "figures" / f"{drawing.name}{suffix}")


def tables_markdown(tables: Sequence[Table]) -> str:
    """Tables one after the other, each under its title."""
    return "".join(f"\n## {table.title}\n\n{table_markdown(table)}" for table in tables)


def table_markdown(table: Table) -> str:
    """One table and its note; numbers stand at the right."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |\n"

    numeric = [
        bool(table.rows) and all(row[at][:1].isdigit() or row[at] in ("", "–") for row in table.rows)
        for at in range(len(table.columns))
    ]
    rule = "|" + "|".join("---:" if right else "---" for right in numeric) + "|\n"
    text = line(table.columns) + rule + "".join(line(row) for row in table.rows)
    return text + (f"\n{table.note}\n" if table.note else "")


def answers_markdown(answers: Sequence[Answer]) -> str:
    """Questions with their sentences, one paragraph each."""
    return "".join(f"\n## {one.question}\n\n" + "\n\n".join(one.sentences) + "\n" for one in answers)


def _head(study: Study, about: dict[str, Any]) -> str:
    """What was studied, by which command, where and when."""
    environment = about["environment"]
    gpus = ", ".join(gpu["name"] for gpu in environment.get("gpus", ()))
    machine = f"{len(environment['cores'])} cores of {environment['processor']}" + (f", {gpus}" if gpus else "")
    versions = environment["versions"]
    own = f", stagewright {versions['stagewright']}" if "stagewright" in versions else ""
    return f"# {study.title}\n\n`{about['command']}`\n\n{machine}; torch {versions['torch']}{own}; {about['begun']}\n"
