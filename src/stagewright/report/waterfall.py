"""Where a recorded step goes, as a page."""

from __future__ import annotations

from stagewright import __version__
from stagewright.quantity import format_s
from stagewright.report.page.content.breakdown import share_chart
from stagewright.report.page.content.timeline import make_timeline
from stagewright.report.page.sections import Page, Section
from stagewright.report.tables.trace import share_table
from stagewright.report.tables.waterfall import waterfall_table
from stagewright.trace.events import Trace
from stagewright.trace.stragglers.blame import Culprit
from stagewright.trace.waterfall import StepExplanation


def explanation_page(trace: Trace, explanation: StepExplanation, culprit: Culprit | None) -> Page:
    """Return the page: waterfall, each rank's step, and the timeline."""
    prose = [explanation.advice, *([] if culprit is None else [culprit.sentence])]
    shares = share_chart(explanation.workers, "shares", f"step {explanation.step} of each rank")
    sections = (
        Section(
            name="step",
            title="Step",
            prose=tuple(f"{line}." for line in prose),
            items=(waterfall_table(explanation), shares),
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
