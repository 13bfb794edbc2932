"""Sections on step time: every worker's timeline, and the breakdown of its step."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.quantity import format_s
from stagewright.report.page.content.runs import RunData
from stagewright.report.page.content.timeline import MAX_EVENTS, make_timeline
from stagewright.report.page.sections import Bar, BarChart, BarPart, Section, fold_items, slug
from stagewright.trace.breakdown import WorkerShare, breakdown


def timeline_section(runs: Sequence[RunData]) -> Section | None:
    """Show a timeline of each run that recorded events."""
    recorded = [(run, run.trace) for run in runs if run.trace is not None]
    missing = tuple(
        f"{run.label} has no timeline: {run.missing['trace']}."
        for run in runs
        if run.trace is None and "trace" in run.missing
    )
    if not recorded:
        return Section(name="timeline", title="Timeline", prose=missing) if missing else None
    max_events = MAX_EVENTS // len(recorded)
    items = tuple(
        make_timeline(trace, name=f"timeline-{slug(run.label)}", title=run.label, max_events=max_events)
        for run, trace in recorded
    )
    error_s = max(worker.clock_error_s for _, trace in recorded for worker in trace.workers)
    clocks = (f"Clocks of other hosts are synchronized to worker 0 within {format_s(error_s)}.",) if error_s > 0 else ()
    return Section(name="timeline", title="Timeline", prose=(*clocks, *missing), items=fold_items(items, "timelines"))


def breakdown_section(runs: Sequence[RunData]) -> Section | None:
    """Show each worker's step as stacked bars."""
    charts = []
    for run in runs:
        if run.trace is not None:
            step = run.trace.median_step
            shares = breakdown(run.trace, step)
            charts.append(share_chart(shares, f"shares-{slug(run.label)}", f"{run.label}: step {step} of each worker"))
    if not charts:
        return None
    prose = (
        "Compute is forward, backward, recomputation and the optimizer step. Transfer is exposed P2P communication: "
        "sends, receives in flight, and codecs. Collective is exposed collective communication. Bubble is idle time "
        "that the schedule causes even with free links. Wait is waiting for a late peer (straggler). Overhead is the "
        "engine's own work. The parts add up to the median step of each run.",
    )
    items = fold_items(charts, "runs")
    return Section(name="breakdown", title="Step time breakdown", prose=prose, items=items)


def share_chart(shares: Sequence[WorkerShare], name: str, title: str) -> BarChart:
    """Draw each worker's step as a stacked bar."""
    return BarChart(name=name, title=title, quantity="seconds", bars=tuple(_share_bar(share) for share in shares))


def _share_bar(share: WorkerShare) -> Bar:
    start, parts = 0.0, []
    for name, seconds in share.parts().items():
        if seconds > 1e-6 * share.step_s:
            hint = f"{name} {format_s(seconds)}, {seconds / share.step_s:.0%}"
            parts.append(BarPart(name=name, paint=f"share-{name}", start=start, end=start + seconds, hint=hint))
            start += seconds
    text = f"{share.compute_s / share.step_s:.0%} compute of {format_s(share.step_s)}"
    return Bar(label=f"worker {share.worker}", parts=tuple(parts), text=text)
