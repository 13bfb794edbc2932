"""The HTML report of a study: its answers, tables and figures, then its runs."""

from __future__ import annotations

from pathlib import Path

from stagewright.files.atomic import save_text
from stagewright.report.page.build import build_report, run_sections
from stagewright.report.page.content.runs import MAX_RUNS, read_runs
from stagewright.report.page.content.study import study_sections
from stagewright.report.page.html import page_html
from stagewright.report.page.sections import Page
from stagewright.runs.run_folder import RunFolder


def write_page(folder: Path, title: str) -> Path:
    """Write report.html into a study's folder; of more than MAX_RUNS runs it shows the first."""
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
    path = folder / "report.html"
    save_text(page_html(page), path)
    return path
