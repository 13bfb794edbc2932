"""Where the time went: every worker's timeline, and its step in parts that add up."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.quantity import format_s
from stagewright.report.page.content.runs import RunData
from stagewright.report.page.content.timeline import MOST_EVENTS, make_timeline
from stagewright.report.page.sections import Bar, BarChart, BarPart, Section, folded
from stagewright.report.page.slug import slug
from stagewright.trace.breakdown import breakdown

__all__ = ["shares_section", "timeline_section"]


def timeline_section(runs: Sequence[RunData]) -> Section | None:
    """A timeline for each run that was recorded."""
    recorded = [(run, run.trace) for run in runs if run.trace is not None]
    absent = _absent(runs)
    if not recorded:
        return Section(name="timeline", title="Timeline", prose=absent) if absent else None
    most = MOST_EVENTS // len(recorded)
    items = tuple(
        make_timeline(trace, name=f"timeline-{slug(run.label)}", title=run.label, most=most) for run, trace in recorded
    )
    errors = [worker.clock_error_s for _, trace in recorded for worker in trace.workers]
    clocks = (
        (f"Workers on other hosts are on worker 0's clock, within {format_s(max(errors))}.",) if max(errors) > 0 else ()
    )
    return Section(name="timeline", title="Timeline", prose=(*clocks, *absent), items=folded(items, "timelines"))


def shares_section(runs: Sequence[RunData]) -> Section | None:
    """The step of each worker in parts, as stacked bars."""
    charts = []
    for run in runs:
        if run.trace is None:
            continue
        step = run.trace.median_step
        bars = []
        for share in breakdown(run.trace, step):
            at, parts = 0.0, []
            for name, seconds in share.parts().items():
                if seconds > 1e-6 * share.step_s:
                    hint = f"{name} {format_s(seconds)}, {seconds / share.step_s:.0%}"
                    parts.append(BarPart(name=name, paint=f"share-{name}", start=at, end=at + seconds, hint=hint))
                    at += seconds
            busy = f"{share.compute_s / share.step_s:.0%} computing of {format_s(share.step_s)}"
            bars.append(Bar(label=f"worker {share.worker}", parts=tuple(parts), text=busy))
        charts.append(
            BarChart(
                name=f"shares-{slug(run.label)}",
                title=f"{run.label}: step {step} of each worker",
                quantity="seconds",
                bars=tuple(bars),
            )
        )
    if not charts:
        return None
    prose = (
        "Compute is forward, backward and the optimiser; transfer is messages being handed over, encoded, decoded and "
        "on their way; collective is sums and gathers that are waited for; bubble is waiting that the schedule makes "
        "even with free links; wait is waiting for a peer that is late; overhead is the engine's own work. The step is "
        "the median one of each run, and the parts add up to it.",
    )
    return Section(name="shares", title="Where each worker's time went", prose=prose, items=folded(charts, "runs"))


def _absent(runs: Sequence[RunData]) -> tuple[str, ...]:
    """Why runs are not drawn; once where the reason is the same."""
    found = {run.label: run.missing["trace"] for run in runs if run.trace is None and "trace" in run.missing}
    return tuple(f"{label} has no timeline: {reason}." for label, reason in found.items())
