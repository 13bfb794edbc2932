"""From folders to a page: every section that has something to say, in the order in which questions come up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stagewright import __version__
from stagewright.report.page.content.breakdown import shares_section, timeline_section
from stagewright.report.page.content.environment import again_section, environment_section
from stagewright.report.page.content.fabric import fabric_sections
from stagewright.report.page.content.forecast import forecast_section
from stagewright.report.page.content.learning import learning_section
from stagewright.report.page.content.memory import memory_section
from stagewright.report.page.content.overview import compare_section, overview_section, plans_section
from stagewright.report.page.content.runs import MOST_RUNS, Found, RunData, find_folders, read_runs
from stagewright.report.page.content.speed import speed_section, why_section
from stagewright.report.page.content.study import study_sections
from stagewright.report.page.content.traffic import traffic_section
from stagewright.report.page.sections import Page, Section

__all__ = ["Report", "build_report", "run_sections"]

Forecaster = Callable[[RunData], RunData]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A page and what it is of."""

    page: Page
    """What is shown."""
    runs: tuple[RunData, ...]
    """The runs that are on it."""
    found: Found
    """The folders that were found."""


def build_report(
    paths: Sequence[str | Path],
    *,
    title: str | None = None,
    extra: Sequence[Section] = (),
    forecaster: Forecaster | None = None,
    newest: int = MOST_RUNS,
) -> Report:
    """The page of what was named: runs, folders of runs, fabric runs, studies; `extra` sections come first of all.

    Of the runs the newest so many are shown, and how many that leaves out is said.
    """
    found = find_folders(paths, newest)
    runs = read_runs(found.runs)
    if forecaster is not None:
        runs = tuple(forecaster(run) if run.is_timed else run for run in runs)
    told = [section for folder in found.studies for section in study_sections(folder)]
    sections = (*extra, *told, *run_sections(runs), *fabric_sections(found.fabrics), *_damaged(found))
    page = Page(
        title=title or _title(runs, found),
        subtitle=_subtitle(runs, found),
        sections=sections,
        footer=f"Made by stagewright {__version__} from the run folders alone; this file loads nothing from anywhere.",
    )
    return Report(page=page, runs=runs, found=found)


def run_sections(runs: Sequence[RunData]) -> tuple[Section, ...]:
    """Everything about runs; nothing where there are none."""
    if not runs:
        return ()
    makers: tuple[Callable[[Sequence[RunData]], Section | None], ...] = (
        overview_section,
        compare_section,
        speed_section,
        why_section,
        timeline_section,
        shares_section,
        memory_section,
        traffic_section,
        learning_section,
        forecast_section,
        plans_section,
        environment_section,
        again_section,
    )
    return tuple(section for make in makers if (section := make(runs)) is not None)


def _damaged(found: Found) -> tuple[Section, ...]:
    """Runs that were left out, with the reasons."""
    if not found.damaged:
        return ()
    return (Section(name="damaged", title="Runs that can't be read", prose=tuple(f"{one}." for one in found.damaged)),)


def _title(runs: Sequence[RunData], found: Found) -> str:
    models = list(dict.fromkeys(run.plan.model.name for run in runs))
    if models:
        strategies = list(dict.fromkeys(run.plan.mesh.strategy for run in runs))
        shown = ", ".join(models[:3]) + (", …" if len(models) > 3 else "")
        return f"{shown}: {', '.join(strategies[:5])}{', …' if len(strategies) > 5 else ''}"
    if found.studies:
        return found.studies[0].name
    return f"Fabric: {found.fabrics[0].path.name}"


def _subtitle(runs: Sequence[RunData], found: Found) -> str:
    counts = ((len(runs), "run"), (len(found.fabrics), "fabric run"), (len(found.studies), "study"))
    plural = {"run": "runs", "fabric run": "fabric runs", "study": "studies"}
    words = [f"{count} {name if count == 1 else plural[name]}" for count, name in counts if count]
    begun = sorted(str(run.environment["begun"])[:10] for run in runs if run.environment.get("begun"))
    when = "" if not begun else f" of {begun[0]}" if begun[0] == begun[-1] else f" from {begun[0]} to {begun[-1]}"
    left_out = f" ({found.left_out})" if found.left_out else ""
    return " and ".join(words) + when + left_out
