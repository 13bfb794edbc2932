"""Section on attached jobs: what they achieve, where a step goes, what to change, and who is slow."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.attachment.summary import summarize
from stagewright.errors import UsageError
from stagewright.report.page.content.runs import RunData
from stagewright.report.page.sections import Item, Section
from stagewright.report.tables.attached import attached_table
from stagewright.report.tables.waterfall import waterfall_table
from stagewright.trace.attached import is_attached
from stagewright.trace.stragglers.blame import find_culprit
from stagewright.trace.stragglers.from_trace import job_of_trace
from stagewright.trace.waterfall import explain_trace


def attached_section(runs: Sequence[RunData]) -> Section | None:
    """Show each job that `attach` recorded."""
    prose: list[str] = []
    items: list[Item] = []
    for run in runs:
        if not is_attached(run.folder):
            continue
        try:
            items.append(attached_table(summarize(run.folder), run.label))
        except UsageError as error:
            prose.append(f"{error}.")
        if run.trace is not None:
            explanation = explain_trace(run.trace)
            culprit = find_culprit(job_of_trace(run.trace)) if len(run.trace.workers) > 1 else None
            prose += [
                f"{run.label}: {line}." for line in (explanation.advice, culprit.sentence if culprit else "") if line
            ]
            items.append(waterfall_table(explanation))
    if not items and not prose:
        return None
    return Section(name="jobs", title="Attached jobs", prose=tuple(prose), items=tuple(items))
