"""The page of a study: its answers, tables and figures, then its runs."""

from __future__ import annotations

from pathlib import Path

from stagewright.files.atomic import save_text
from stagewright.report.page.build import build_report, run_sections
from stagewright.report.page.content.runs import MOST_RUNS, read_runs
from stagewright.report.page.content.study import study_sections
from stagewright.report.page.html import page_html
from stagewright.report.page.sections import Page
from stagewright.runs.run_folder import RunFolder

__all__ = ["write_page"]


def write_page(folder: Path, title: str) -> Path:
    """Write report.html of a study's folder; of very many runs the first are shown."""
    runs = sorted(one for one in (folder / "runs").iterdir() if (one / "plan.toml").is_file())
    if len(runs) <= MOST_RUNS:
        page = build_report([folder], title=title).page
    else:
        shown = read_runs([RunFolder(one) for one in runs[:MOST_RUNS]])
        page = Page(
            title=title,
            subtitle=f"{len(runs)} runs, of which the first {MOST_RUNS} are shown",
            sections=(*study_sections(folder), *run_sections(shown)),
        )
    path = folder / "report.html"
    save_text(page_html(page), path)
    return path
