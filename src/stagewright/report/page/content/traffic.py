"""What crossed the links in a step, and what was given to collectives."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.quantity import format_bytes
from stagewright.report.page.content.runs import RunData
from stagewright.report.page.sections import Bar, BarChart, BarPart, Section
from stagewright.report.tables.compare import collective_label

__all__ = ["traffic_section"]


def traffic_section(runs: Sequence[RunData]) -> Section | None:
    """One bar a link or collective; runs that send nothing have none."""
    bars = []
    for run in runs:
        if not run.is_timed or run.plan.mesh.num_workers == 1:
            continue
        for name, count in _sizes(run).items():
            text = format_bytes(count)
            parts = (BarPart(name="", paint=run.paint, start=0.0, end=float(count), hint=text),)
            bars.append(Bar(label=f"{run.label}: {name}", parts=parts, text=text))
    if not bars:
        return None
    prose = [
        "What one step hands over, both ways: messages of all micro-batches across each cut, and the payload that all "
        "workers together give to sums and gathers."
    ]
    if len(bars) == 1:
        return Section(name="traffic", title="Bytes sent", prose=(*prose, f"{bars[0].label}: {bars[0].text}."))
    chart = BarChart(name="traffic", title="Bytes of a step", quantity="bytes", bars=tuple(bars))
    return Section(name="traffic", title="Bytes sent", prose=tuple(prose), items=(chart,))


def _sizes(run: RunData) -> dict[str, int]:
    """Link or collective → bytes of a step."""
    plan, found = run.plan, {}
    for edge, count in run.result.get("link_bytes", {}).items():
        if count:
            after = f" after {plan.cuts[int(edge)]}" if int(edge) < len(plan.cuts) else ""
            codec = plan.codec_of(int(edge)) if plan.has_codecs else "none"
            how = f", {codec}" if codec != "none" else ""
            found[f"cut {edge}{after}{how}"] = int(count)
    axes: dict[str, int] = {}
    for worker in run.result.get("collective_bytes", []):
        for axis, count in worker.items():
            axes[axis] = axes.get(axis, 0) + int(count)
    return found | {collective_label(axis): count for axis, count in axes.items() if count}
