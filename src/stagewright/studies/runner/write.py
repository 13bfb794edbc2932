"""Write the findings of a study into its folder: answers.md, table.md, findings.json, figures and report.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stagewright.files.atomic import save_text
from stagewright.studies.framework.study import Answer, Findings, Results, Study, Summary
from stagewright.studies.runner.folder import StudyFolder, as_json
from stagewright.table import Table

ANSWERS, FINDINGS = "answers.md", "findings.json"


def write_findings(findings: Findings, study: Study, folder: StudyFolder, results: Results) -> None:
    """Write summary, answers, tables and figures: for people, and for the page in findings.json."""
    head = _head(study, folder.about())
    save_text(head + tables_markdown(findings.tables), folder.path / "table.md")
    save_text(head + _summary_markdown(findings.summary) + answers_markdown(findings.answers), folder.path / ANSWERS)
    for figure in findings.figures:
        for suffix in (".svg", ".png"):
            figure.draw(folder.path / "figures" / f"{figure.name}{suffix}")
    content = {
        "summary": [] if findings.summary is None else [list(row) for row in findings.summary.rows],
        "answers": [answer.to_dict() for answer in findings.answers],
        "tables": [
            {**table.to_dict(), "align": [column.align for column in table.columns]} for table in findings.tables
        ],
        "figures": [{"name": figure.name, "caption": figure.caption} for figure in findings.figures],
        "runs": run_names(study, results),
    }
    save_text(as_json(content), folder.path / FINDINGS)


def write_page(folder: Path, title: str) -> None:
    """Write report.html: the findings, then the runs, folded."""
    from stagewright.report.page.build import build_report
    from stagewright.report.page.html import page_html

    save_text(page_html(build_report([folder], title=title).page), folder / "report.html")


def run_names(study: Study, results: Results) -> dict[str, str]:
    """Name every run folder of a study as people would: by what its part did."""
    names: dict[str, str] = {}
    for part in study.parts:
        data = results.get(part.name)
        if not isinstance(data, Mapping):
            continue
        about = part.run_name or part.about.removesuffix(", round 1 of 1")
        if data.get("run"):
            names[Path(data["run"]).name] = about
        for attempt in data.get("attempts") or ():
            if attempt.get("run"):
                size = f"{attempt['layers']} layers" if "layers" in attempt else f"batch {attempt['batch']}"
                names[Path(attempt["run"]).name] = f"{about}, {size}"
    return names


def _summary_markdown(summary: Summary | None) -> str:
    if summary is None:
        return ""
    return "\n## Summary\n\n" + "\n\n".join(f"**{name}**: {text}" for name, text in summary.rows) + "\n"


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
