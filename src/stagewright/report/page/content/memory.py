"""The section on memory: the peak of each worker by category, and memory over a step where it was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from stagewright.quantity import format_bytes
from stagewright.report.page.content.runs import RunData
from stagewright.report.page.sections import Bar, BarChart, BarPart, Item, Line, LineChart, Section, fold_items, slug
from stagewright.trace.memory import CATEGORIES, WorkerMemory, peak_sentence

_MAX_LINES = 8  # curves of more workers are not distinguishable
_MAX_POINTS = 1500


def memory_section(runs: Sequence[RunData]) -> Section | None:
    """Show stacked bars of the peaks, then memory over time."""
    measured = [run for run in runs if run.result.memory]
    curves = tuple(_memory_chart(run) for run in runs if run.memory)
    if not measured and not curves:
        return None
    bars = tuple(bar for run in measured for bar in _peak_bars(run, with_run=len(measured) > 1))
    items: list[Item] = []
    prose = [
        "Peak memory of a worker's tensors in one step: parameters, gradients, optimizer states, saved activations and "
        "buffers."
    ]
    if len(bars) > 1:
        title = "Peak memory of each worker, by category"
        items.append(BarChart(name="memory", title=title, quantity="bytes", bars=bars))
    elif bars:
        prose.append(f"{bars[0].label}: {bars[0].text} at the peak.")
    items += fold_items(curves, "runs", 4)
    unrecorded = [run for run in runs if run.is_timed and not run.memory]
    if unrecorded:
        reason = unrecorded[0].missing.get("memory", "")
        labels = ", ".join(run.label for run in unrecorded)
        prose.append(f"Memory over time was not recorded by {labels}{f': {reason}' if reason else ''}.")
    return Section(name="memory", title="Memory", prose=tuple(prose), items=tuple(items))


def _peak_bars(run: RunData, *, with_run: bool) -> list[Bar]:
    bars = []
    for rank, memory in enumerate(run.result.memory):
        start, parts = 0.0, []
        for name, size in asdict(memory).items():
            if size:
                paint = f"memory-{name if name in CATEGORIES else 'other'}"
                hint = f"{name} {format_bytes(size)}"
                parts.append(BarPart(name=name, paint=paint, start=start, end=start + size, hint=hint))
                start += size
        label = f"{run.label}, worker {rank}" if with_run else f"worker {rank}"
        bars.append(Bar(label=label, parts=tuple(parts), text=format_bytes(start)))
    return bars


def _memory_chart(run: RunData) -> LineChart:
    num_workers = len(run.memory)
    peak = peak_sentence(max(run.memory, key=lambda memory: memory.peak.total_bytes))
    omitted = f" The first {_MAX_LINES} of {num_workers} workers are drawn." if num_workers > _MAX_LINES else ""
    return LineChart(
        name=f"memory-over-time-{slug(run.label)}",
        title=f"{run.label}: memory over one step",
        x_title="time",
        y_title="memory",
        x_quantity="seconds",
        y_quantity="bytes",
        lines=tuple(_memory_line(memory, run) for memory in run.memory[:_MAX_LINES]),
        note=f"{peak[:1].upper()}{peak[1:]}.{omitted}",
    )


def _memory_line(memory: WorkerMemory, run: RunData) -> Line:
    """Draw a worker in the color of its first stage where no other worker has that stage."""
    moments = memory.moments
    stride = max(1, -(-len(moments) // _MAX_POINTS))
    # Of each group keep the largest moment, so that no peak is lost.
    kept = [
        max(moments[index : index + stride], key=lambda moment: moment.total_bytes)
        for index in range(0, len(moments), stride)
    ]
    mesh = run.plan.mesh
    pipeline_rank = mesh.coordinates(memory.rank)[2]
    color = run.plan.stages_of(pipeline_rank)[0] if mesh.pipeline == mesh.num_workers else memory.rank
    return Line(
        name=f"worker {memory.rank}",
        paint=f"stage-{color % 16}",
        x=tuple(moment.time_s for moment in kept),
        y=tuple(float(moment.total_bytes) for moment in kept),
        style="step",
        dashed=memory.rank % 2 == 1,
    )
