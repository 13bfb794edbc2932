"""Where a recorded step goes, as tables and as a page."""

from __future__ import annotations

from stagewright import __version__
from stagewright.quantity import format_s
from stagewright.report.page.content.breakdown import share_chart
from stagewright.report.page.content.timeline import make_timeline
from stagewright.report.page.sections import Page, Section
from stagewright.report.tables.trace import share_table
from stagewright.table import Table, number_columns, text_columns
from stagewright.trace.events import Trace
from stagewright.trace.waterfall import StepExplanation

_MAX_WORKERS = 64  # rows of a table in the terminal


def explanation_tables(explanation: StepExplanation) -> tuple[Table, ...]:
    """Return the waterfall, and the breakdown of each rank where there are several."""
    tables = [waterfall_table(explanation)]
    if len(explanation.workers) > 1:
        tables.append(share_table(explanation.workers[:_MAX_WORKERS], "by rank"))
    return tuple(tables)


def waterfall_table(explanation: StepExplanation) -> Table:
    """Tabulate the parts of the step, which add up to it."""
    rows = [(row.name, format_s(row.seconds), f"{row.share:.1%}", row.change) for row in explanation.rows]
    rows.append(("step", format_s(explanation.step_s), f"{sum(row.share for row in explanation.rows):.1%}", ""))
    count = len(explanation.workers)
    ranks = "1 rank" if count == 1 else f"mean of {count} ranks ({explanation.mesh})"
    return Table(
        title=f"step {explanation.step} ({explanation.num_steps} recorded), {ranks}",
        columns=(
            *text_columns("part"),
            *number_columns("time", "of the step"),
            *text_columns("what reduces it", wrap=True),
        ),
        rows=tuple(rows),
    )


def explanation_page(trace: Trace, explanation: StepExplanation) -> Page:
    """Return the page: waterfall, each rank's step, and the timeline."""
    shares = share_chart(explanation.workers, "shares", f"step {explanation.step} of each rank")
    sections = (
        Section(
            name="step", title="Step", prose=(explanation.advice + ".",), items=(waterfall_table(explanation), shares)
        ),
        Section(
            name="ranks", title="Ranks", items=(share_table(explanation.workers, f"step {explanation.step} by rank"),)
        ),
        Section(name="timeline", title="Timeline", items=(make_timeline(trace, name="timeline", title="all ranks"),)),
    )
    return Page(
        title=f"A step takes {format_s(explanation.step_s)}",
        subtitle=f"{explanation.source}: {len(explanation.workers)} ranks, {explanation.mesh}",
        sections=sections,
        footer=f"Made by stagewright {__version__}; this file loads nothing from the network.",
    )
