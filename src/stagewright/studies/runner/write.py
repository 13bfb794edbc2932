"""Write the findings of a study into its folder: table.md, answers.md, figures and report.html."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
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


def write_page(folder: Path, title: str) -> None:
    """Write report.html: answers, tables and figures, then the runs; of more than MAX_RUNS runs the first."""
    from stagewright.report.page.build import build_report, run_sections
    from stagewright.report.page.content.runs import MAX_RUNS, read_runs
    from stagewright.report.page.content.study import study_sections
    from stagewright.report.page.html import page_html
    from stagewright.report.page.sections import Page
    from stagewright.runs.run_folder import RunFolder

    runs = sorted(path for path in (folder / "runs").iterdir() if (path / "plan.toml").is_file())
    if len(runs) <= MAX_RUNS:
        page = build_report([folder], title=title).page
    else:
        shown = read_runs([RunFolder(path) for path in runs[:MAX_RUNS]])
        page = Page(
            title=title,
            subtitle=f"{len(runs)} runs, of which the first {MAX_RUNS} are shown",
            sections=(*study_sections(folder), *run_sections(shown)),
        )
    save_text(page_html(page), folder / "report.html")


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
