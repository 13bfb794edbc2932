"""From folders to a report page: every section that has content, in reading order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stagewright import __version__
from stagewright.report.page.content.attached import attached_section
from stagewright.report.page.content.breakdown import breakdown_section, timeline_section
from stagewright.report.page.content.environment import environment_section, reproduce_section
from stagewright.report.page.content.fabric import fabric_sections
from stagewright.report.page.content.forecast import forecast_section
from stagewright.report.page.content.memory import memory_section
from stagewright.report.page.content.overview import compare_section, overview_section, plans_section
from stagewright.report.page.content.runs import MAX_RUNS, ReportFolders, RunData, find_folders, read_runs
from stagewright.report.page.content.speed import result_section, speed_section, speedup_breakdown_section
from stagewright.report.page.content.study import read_run_names, study_section
from stagewright.report.page.content.traffic import traffic_section
from stagewright.report.page.content.training import training_section
from stagewright.report.page.sections import Fold, Page, Prose, Section, slug
from stagewright.runs.run_folder import RunFolder

Forecaster = Callable[[RunData], RunData]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A page with its sources."""

    page: Page
    runs: tuple[RunData, ...]
    """The runs on the page."""
    folders: ReportFolders


def build_report(
    paths: Sequence[str | Path],
    *,
    title: str | None = None,
    extra: Sequence[Section] = (),
    forecaster: Forecaster | None = None,
    newest: int = MAX_RUNS,
) -> Report:
    """Build the page of runs, folders of runs, fabric runs and studies.

    Args:
        paths: The folders.
        title: Title of the page; by default models and strategies.
        extra: Sections to put first.
        forecaster: Adds forecasts to runs: see `content.forecast`.
        newest: How many runs to show, newest first; the subtitle says how many are left out.
    """
    folders = find_folders(paths, newest)

    def read(chosen: Sequence[RunFolder], names: Mapping[str, str]) -> tuple[RunData, ...]:
        data = read_runs(chosen, names)
        return data if forecaster is None else tuple(forecaster(run) if run.is_timed else run for run in data)

    studies: list[Section] = []
    runs: tuple[RunData, ...] = ()
    rest, fabrics = list(folders.runs), list(folders.fabrics)
    for folder in folders.studies:
        own = [run for run in rest if run.path.resolve().parent.parent == folder.resolve()]
        own_fabrics = [run for run in fabrics if run.path.resolve().parent.parent == folder.resolve()]
        rest = [run for run in rest if run not in own]
        fabrics = [run for run in fabrics if run not in own_fabrics]
        names = read_run_names(folder)
        runs += (study_runs := read(own, names))
        sections_of_runs = (*run_sections(study_runs), *fabric_sections(own_fabrics, names))
        studies += [study_section(folder), *_folded(sections_of_runs, folder)]
    runs += (plain := read(rest, {}))
    reasons = tuple(f"{reason}." for reason in folders.damaged)
    damaged = (Section(name="damaged", title="Damaged runs", prose=reasons),) if reasons else ()
    sections = (*extra, *studies, *run_sections(plain), *fabric_sections(fabrics), *damaged)
    page = Page(
        title=title or _title(runs, folders),
        subtitle=_subtitle(runs, folders),
        sections=sections,
        footer=f"Made by stagewright {__version__} from the run folders; this file loads nothing from the network.",
    )
    return Report(page=page, runs=runs, folders=folders)


def _folded(sections: Sequence[Section], folder: Path) -> tuple[Section, ...]:
    """The sections of a study's runs as one section, whose parts open on a click."""
    folds = []
    for section in sections:
        prose = (Prose(title="", paragraphs=section.prose),) if section.prose else ()
        folds.append(Fold(title=section.title, items=(*prose, *section.items)))
    return (Section(name=f"runs-{slug(folder.name)}", title="Runs", items=tuple(folds)),) if folds else ()


def run_sections(runs: Sequence[RunData]) -> tuple[Section, ...]:
    if not runs:
        return ()
    makers: tuple[Callable[[Sequence[RunData]], Section | None], ...] = (
        result_section,
        attached_section,
        compare_section,
        speed_section,
        speedup_breakdown_section,
        timeline_section,
        breakdown_section,
        memory_section,
        traffic_section,
        training_section,
        forecast_section,
        overview_section,
        plans_section,
        environment_section,
        reproduce_section,
    )
    return tuple(section for make in makers if (section := make(runs)) is not None)


def _title(runs: Sequence[RunData], folders: ReportFolders) -> str:
    models = list(dict.fromkeys(run.plan.model.name for run in runs))
    if models:
        strategies = list(dict.fromkeys(run.plan.mesh.strategy for run in runs))
        shown = ", ".join(models[:3]) + (", …" if len(models) > 3 else "")
        return f"{shown}: {', '.join(strategies[:5])}{', …' if len(strategies) > 5 else ''}"
    if folders.studies:
        return folders.studies[0].name
    return f"Fabric: {folders.fabrics[0].path.name}"


def _subtitle(runs: Sequence[RunData], folders: ReportFolders) -> str:
    counts = ((len(runs), "run"), (len(folders.fabrics), "fabric run"), (len(folders.studies), "study"))
    plurals = {"run": "runs", "fabric run": "fabric runs", "study": "studies"}
    words = [f"{count} {name if count == 1 else plurals[name]}" for count, name in counts if count]
    dates = sorted(str(run.environment["begun"])[:10] for run in runs if run.environment.get("begun"))
    period = "" if not dates else f" of {dates[0]}" if dates[0] == dates[-1] else f" from {dates[0]} to {dates[-1]}"
    left_out = f" ({folders.left_out})" if folders.left_out else ""
    return joined_counts(words) + period + left_out


def joined_counts(words: Sequence[str]) -> str:
    """Join counts: "40 runs, 8 fabric runs and 5 studies"."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)
