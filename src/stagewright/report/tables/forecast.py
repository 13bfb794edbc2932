"""A forecast as tables: workers, links, and the breakdown of the speed-up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagewright.quantity import format_bytes, format_s
from stagewright.simulator.what_if import LOSSES, SpeedupBreakdown
from stagewright.table import Cell, Table, number_columns, text_columns

if TYPE_CHECKING:
    from stagewright.planner.explain import Explanation
    from stagewright.simulator.forecast import CollectiveUse, Forecast


def forecast_summary(forecast: Forecast) -> str:
    """Summarize step time, throughput, speed-up and memory in one line."""
    fits = "" if forecast.fits else "; DOES NOT FIT"
    in_microbatches = forecast.microbatches > 1 or "data=" in forecast.mesh
    baseline = "one device with the same micro-batches" if in_microbatches else "one device"
    return (
        f"step {format_s(forecast.step_s)}, {forecast.samples_per_s:.4g} samples/s, "
        f"speed-up {forecast.speedup:.2f} × over {baseline} ({format_s(forecast.serial_s)}), "
        f"peak memory {format_bytes(forecast.peak_memory_bytes)}{fits}"
    )


def worker_table(forecast: Forecast) -> Table:
    """Tabulate what each pipeline rank does in a step; workers that run out of memory are marked."""
    peers = forecast.num_workers // len(forecast.workers)
    scope = f" (one row for {peers} workers)" if peers > 1 else ""
    rows = []
    for worker in forecast.workers:
        limit = worker.memory_limit_bytes
        cells = (
            str(worker.worker),
            ", ".join(map(str, worker.stages)),
            format_s(worker.compute_s),
            format_positive(worker.recompute_s),
            format_positive(worker.tensor_s),
            format_positive(worker.data_s),
            format_positive(worker.optimizer_s),
            f"{format_s(worker.idle_s)} ({worker.idle_s / forecast.step_s:.0%})" if forecast.step_s else "–",
            format_positive(worker.send_s),
            format_positive(worker.receive_s),
            format_bytes(worker.memory.peak_bytes),
            "–" if limit is None else format_bytes(limit),
        )
        rows.append(tuple(Cell(text, "plain" if worker.fits else "bad") for text in cells))
    names = ("compute", "recompute", "TP comm", "DP comm", "optimizer", "idle", "sends", "receives")
    return Table(
        title=f"{forecast.model}: {forecast.strategy} on {forecast.num_workers} workers, forecast{scope}",
        columns=(*number_columns("worker"), *text_columns("stages"), *number_columns(*names, "peak memory", "limit")),
        rows=tuple(rows),
    )


def link_use_table(forecast: Forecast) -> Table:
    """Tabulate the P2P traffic on each link."""
    return Table(
        title="P2P links of the pipeline, per step",
        columns=number_columns("after stage", "workers", "bytes", "busy"),
        rows=tuple(
            (str(link.edge), f"{link.sender} – {link.receiver}", format_bytes(link.num_bytes), format_s(link.busy_s))
            for link in forecast.links
        ),
    )


def collective_line(use: CollectiveUse) -> str:
    """Describe the traffic of one worker's collectives in a sentence."""
    kind = "all-reduces of tied weights" if use.axis == "tied" else f"{use.axis} collectives"
    return (
        f"worker {use.worker}: {format_bytes(use.num_bytes)} per step in {kind} over {use.num_workers} workers, "
        f"{format_bytes(use.sent_bytes)} sent to its ring neighbor"
    )


def explanation_table(explanation: Explanation) -> Table:
    """Tabulate the breakdown of an explanation's speed-up."""
    return waterfall_table(explanation.parts, explanation.title)


def waterfall_table(breakdown: SpeedupBreakdown, title: str) -> Table:
    """Tabulate the way from the ideal speed-up n down to the actual one, one loss per row."""
    rows = [
        (
            "ideal",
            format_s(breakdown.ideal_s),
            _format_share(breakdown.ideal_s, breakdown),
            f"{breakdown.num_devices:.2f} ×",
            "single-device baseline / n",
        )
    ]
    for part, (_, lost) in zip(breakdown.parts, breakdown.lost_speedup(), strict=True):
        if abs(part.seconds) < 1e-4 * breakdown.step_s:
            continue
        sign = "+" if part.seconds > 0 else "−"
        rows.append(
            (
                part.name,
                f"{sign} {format_s(abs(part.seconds))}",
                _format_share(part.seconds, breakdown),
                f"{-lost:+.2f} ×".replace("-", "−"),
                LOSSES[part.name],
            )
        )
    baseline = f"the single-device baseline takes {format_s(breakdown.serial_s)}"
    rows.append(("step", format_s(breakdown.step_s), "100.0 %", f"{breakdown.speedup:.2f} ×", baseline))
    return Table(
        title=title,
        columns=(
            *text_columns(""),
            *number_columns("time", "of the step", "speed-up"),
            *text_columns("description", wrap=True),
        ),
        rows=tuple(rows),
    )


def format_positive(seconds: float) -> str:
    """Format a time; – where there is none."""
    return format_s(seconds) if seconds > 0 else "–"


def _format_share(seconds: float, breakdown: SpeedupBreakdown) -> str:
    return f"{100 * seconds / breakdown.step_s:.1f} %".replace("-", "−")
