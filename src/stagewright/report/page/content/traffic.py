"""The section on communication volume."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.quantity import format_bytes
from stagewright.report.page.content.runs import RunData
from stagewright.report.page.sections import BarChart, Section, plain_bar
from stagewright.report.tables.compare import collective_label


def traffic_section(runs: Sequence[RunData]) -> Section | None:
    """Show the bytes of each link and collective; runs without communication have no bar."""
    bars = []
    for run in runs:
        if not run.is_timed or run.plan.mesh.num_workers == 1:
            continue
        for name, size in _sizes(run).items():
            text = format_bytes(size)
            bars.append(plain_bar(f"{run.label}: {name}", run.paint, float(size), text, hint=text))
    if not bars:
        return None
    prose = (
        "Bytes per step: P2P sends of all micro-batches across each cut, in both directions, and the input of "
        "collectives over all workers.",
    )
    title = "Communication volume"
    if len(bars) == 1:
        return Section(name="traffic", title=title, prose=(*prose, f"{bars[0].label}: {bars[0].text}."))
    chart = BarChart(name="traffic", title="Bytes per step", quantity="bytes", bars=tuple(bars))
    return Section(name="traffic", title=title, prose=prose, items=(chart,))


def _sizes(run: RunData) -> dict[str, int]:
    """Return the bytes per step of each link and kind of collective."""
    plan, sizes = run.plan, {}
    for edge, size in run.result.link_bytes.items():
        if size:
            unit = f" after {plan.cuts[int(edge)]}" if int(edge) < len(plan.cuts) else ""
            codec = plan.codec_of(int(edge)) if plan.has_codecs else "none"
            sizes[f"P2P, cut {edge}{unit}{f', {codec}' if codec != 'none' else ''}"] = int(size)
    return sizes | {collective_label(axis): size for axis, size in run.result.axis_bytes.items() if size}
