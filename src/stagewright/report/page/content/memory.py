"""Memory: the peak of each worker by what it is for, and over a step where that was recorded."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.quantity import format_bytes
from stagewright.report.page.content.runs import RunData
from stagewright.report.page.sections import Bar, BarChart, BarPart, Item, Line, LineChart, Section, folded
from stagewright.report.page.slug import slug
from stagewright.trace.memory import CATEGORIES, WorkerMemory, peak_sentence

__all__ = ["memory_section"]

_MOST_LINES = 8  # more workers than that can't be told apart
_MOST_POINTS = 1500


def memory_section(runs: Sequence[RunData]) -> Section | None:
    """Stacked bars of the peaks, then curves."""
    measured = [run for run in runs if run.result.get("memory")]
    curves = tuple(_over_time(run) for run in runs if run.memory)
    if not measured and not curves:
        return None
    bars = tuple(bar for run in measured for bar in _bars(run, several=len(measured) > 1))
    items: list[Item] = []
    prose = [
        "What a worker counts as its own in one step: parameters, gradients, optimiser states, what it keeps for "
        "backward, and buffers."
    ]
    if len(bars) > 1:
        title = "Peak memory of each worker, by what it is for"
        items.append(BarChart(name="memory", title=title, quantity="bytes", bars=bars))
    elif bars:
        prose.append(f"{bars[0].label}: {bars[0].text} at the peak.")
    items += folded(curves, "runs", 4)
    absent = [run.label for run in runs if run.is_timed and not run.memory]
    if absent:
        reason = next(run.missing.get("memory", "") for run in runs if run.label == absent[0])
        told = f": {reason}" if reason else ""
        prose.append(f"Memory over time was not recorded by {', '.join(absent)}{told}.")
    return Section(name="memory", title="Memory", prose=tuple(prose), items=tuple(items))


def _bars(run: RunData, *, several: bool) -> list[Bar]:
    found = []
    for rank, sizes in enumerate(run.result["memory"]):
        at, parts = 0.0, []
        for name, count in sizes.items():
            if count:
                paint = f"memory-{name if name in CATEGORIES else 'other'}"
                hint = f"{name} {format_bytes(count)}"
                parts.append(BarPart(name=name, paint=paint, start=at, end=at + count, hint=hint))
                at += count
        label = f"{run.label}, worker {rank}" if several else f"worker {rank}"
        found.append(Bar(label=label, parts=tuple(parts), text=format_bytes(at)))
    return found


def _over_time(run: RunData) -> LineChart:
    shown = run.memory[:_MOST_LINES]
    why = peak_sentence(max(run.memory, key=lambda one: one.peak.total_bytes))
    left = f" The first {_MOST_LINES} of {len(run.memory)} workers are drawn." if len(run.memory) > _MOST_LINES else ""
    return LineChart(
        name=f"memory-over-time-{slug(run.label)}",
        title=f"{run.label}: memory over one step",
        x_title="time",
        y_title="memory",
        x_quantity="seconds",
        y_quantity="bytes",
        lines=tuple(_line(one, run) for one in shown),
        note=f"{why[:1].upper()}{why[1:]}.{left}",
    )


def _line(memory: WorkerMemory, run: RunData) -> Line:
    """A worker has the colour of its first stage where it holds stages of its own."""
    moments = memory.moments
    every = max(1, -(-len(moments) // _MOST_POINTS))
    # Of each group the moment that holds most, so that no peak is lost.
    kept = [max(moments[at : at + every], key=lambda one: one.total_bytes) for at in range(0, len(moments), every)]
    mesh = run.plan.mesh
    place = mesh.coordinates(memory.rank)[2]
    color = run.plan.stages_of(place)[0] if mesh.pipeline == mesh.num_workers else memory.rank
    return Line(
        name=f"worker {memory.rank}",
        paint=f"stage-{color % 16}",
        x=tuple(one.time_s for one in kept),
        y=tuple(float(one.total_bytes) for one in kept),
        style="step",
        dashed=memory.rank % 2 == 1,
    )
