"""The tables and figures of the study *memory*. Pure but for the drawing itself."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stagewright.quantity import format_bytes, format_s
from stagewright.studies.memory.measured import Measured, shown_way
from stagewright.studies.framework.phrases import percent, spread
from stagewright.studies.framework.study import Drawing, Results, Table

__all__ = ["drawings", "tables"]

Ways = Mapping[str, Measured]


def tables(results: Results, options: Mapping[str, Any], ways: Ways) -> tuple[Table, ...]:
    """Speed and memory, recomputation, what was executed, what fits."""
    return (
        _speed_table(results, ways),
        _recompute_table(ways),
        _executed_table(results),
        _fit_table(results, options),
    )


def drawings(results: Results, options: Mapping[str, Any], ways: Ways) -> tuple[Drawing, ...]:
    """Speed-up and memory side by side."""
    return (
        Drawing(
            name="memory",
            caption="Peak memory of the fullest worker by what it is for, and speed-up over serial, of each strategy.",
            draw=partial(_draw, dict(ways), f"{options['model']} on two devices"),
        ),
    )


def _forecast(results: Results, way: str) -> Mapping[str, Any] | None:
    found = results.get(f"forecast-{way.partition('+')[0]}")
    return None if found is None else found.get(way)


def _speed_table(results: Results, ways: Ways) -> Table:
    rows = []
    for way, one in ways.items():
        forecast = _forecast(results, way)
        rows.append(
            (
                one.strategy,
                "yes" if one.recompute else "no",
                f"{one.samples_per_s:.1f}",
                f"{one.speedup:.2f}" if one.speedup is not None else "–",
                spread(one.speedups) if one.equal else "not equal to serial",
                f"{forecast['speedup']:.2f}" if forecast is not None else "–",
                f"{forecast['free_speedup']:.2f}" if forecast is not None else "–",
                ", ".join(format_bytes(size) for size in one.peak_bytes),
                format_bytes(one.memory["activations"]),
                format_bytes(one.sent_bytes) if one.sent_bytes else "–",
            )
        )
    return Table(
        title="Speed and memory",
        columns=(
            "strategy",
            "recomputed",
            "samples/s",
            "speed-up",
            "range",
            "forecast",
            "ideal",
            "peak memory of each worker",
            "of it activations",
            "sent",
        ),
        rows=tuple(rows),
        note="Speed-up: over serial without recomputation, median over rounds of the ratio within a round; each run "
        "was first proven equal to serial. Ideal: forecast with free communication. Peak: the workers' own tensors on "
        "a CPU, the allocator's on CUDA.",
    )


def _recompute_table(ways: Ways) -> Table:
    rows = []
    for way, plain in ways.items():
        again = ways.get(f"{way}+recompute")
        if again is None:
            continue
        rows.append(
            (
                plain.strategy,
                percent(plain.samples_per_s / again.samples_per_s - 1),
                format_bytes(plain.peak),
                format_bytes(again.peak),
                percent(1 - again.peak / plain.peak),
            )
        )
    return Table(
        title="What recomputation costs and saves",
        columns=("strategy", "time more", "memory without", "memory with", "saved"),
        rows=tuple(rows),
        note="Memory of the fullest worker. Serial, data and tensor recompute block by block, a pipeline by stages.",
    )


def _executed_table(results: Results) -> Table:
    rows = []
    for strategy in ("serial", "data", "tensor", "pipeline"):
        for way, workers in (results.get(f"executed-{strategy}") or {}).items():
            for worker in workers:
                kinds = worker["kinds"]
                backward = sum(int(one["count"]) for kind, one in kinds.items() if kind.startswith("backward"))
                counts = [int(kinds.get(kind, {}).get("count", 0)) for kind in ("recompute", "collective", "send")]
                busy = sum(
                    one["seconds"] for kind, one in kinds.items() if kind in ("forward", "optimizer") or "back" in kind
                )
                rows.append(
                    (
                        shown_way(way),
                        str(worker["worker"]),
                        ", ".join(str(stage) for stage in worker["stages"]) or "–",
                        str(int(kinds.get("forward", {}).get("count", 0))),
                        str(backward),
                        *(str(count) for count in counts),
                        format_s(busy),
                    )
                )
    return Table(
        title="What each worker executed in a step",
        columns=(
            "strategy",
            "worker",
            "stages",
            "forwards",
            "backwards",
            "recomputed",
            "collectives",
            "messages",
            "computing",
        ),
        rows=tuple(rows),
        note="From the events of the step that took the median time. The last stage's loss counts as a forward.",
    )


def _fit_table(results: Results, options: Mapping[str, Any]) -> Table:
    forecasts = results.get("fit-forecast") or {}
    rows = []
    for way, forecast in forecasts.items():
        found = results.get(f"fit-{way}")
        if forecast["refused"]:
            rows.append((shown_way(way), "–", "–", "–", forecast["refused"]))
            continue
        ran, text = "–", "not run"
        if found is not None:
            ran = f"{found['largest']}" if found["is_exact"] else f"{found['largest']} or more"
            text = "; ".join(
                f"{one['layers']}: {'ran' if one['ran'] else 'out of memory'}" for one in found["attempts"]
            )
        peak = next(
            (
                format_bytes(max(one["peak_memory_bytes"]))
                for one in (found or {"attempts": []})["attempts"]
                if one["ran"] and one["layers"] == (found or {})["largest"]
            ),
            "–",
        )
        rows.append((shown_way(way), str(forecast["largest"]), ran, peak, text))
    return Table(
        title=f"The most layers on two devices of {format_bytes(options['memory_bytes'])}",
        columns=("strategy", "forecast", "by running", "peak there", "what was run"),
        rows=tuple(rows),
        note=f"Batch {options['batch']}, {options['sequence_length']} tokens, {options['optimizer']}; a worker that "
        "needs more than the limit ends the run.",
    )


def _draw(ways: Mapping[str, Measured], title: str, path: Path) -> None:
    from stagewright.report.figures.memory import MemoryBar, draw_memory

    bars = [MemoryBar(label=shown_way(way), memory=dict(one.memory), speedup=one.speedup) for way, one in ways.items()]
    draw_memory(bars, path, title=title)
