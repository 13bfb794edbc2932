"""A forecast as tables."""

from __future__ import annotations

from rich import box
from rich.markup import escape
from rich.table import Table

from stagewright.quantity import format_bytes, format_s
from stagewright.simulator.forecast import CollectiveUse, Forecast

__all__ = ["collective_line", "forecast_summary", "link_use_table", "worker_table"]


def forecast_summary(forecast: Forecast) -> str:
    """The figures that count, in one line."""
    fits = "" if forecast.fits else "; DOES NOT FIT"
    in_pieces = forecast.microbatches > 1 or "data=" in forecast.mesh
    alone = "one device in the same micro-batches" if in_pieces else "one device"
    return (
        f"step {format_s(forecast.step_s)}, {forecast.samples_per_s:.4g} samples/s, "
        f"speed-up {forecast.speedup:.2f} × over {alone} ({format_s(forecast.serial_s)}), "
        f"peak memory {format_bytes(forecast.peak_memory_bytes)}{fits}"
    )


def worker_table(forecast: Forecast) -> Table:
    """What each place along the pipeline does in a step."""
    peers = forecast.num_workers // len(forecast.workers)
    same = f" (each for {peers} workers)" if peers > 1 else ""
    table = Table(
        title=escape(f"{forecast.model}: {forecast.strategy} on {forecast.num_workers} workers, forecast{same}"),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title_justify="left",
    )
    table.add_column("worker", justify="right")
    table.add_column("stages")
    for name in (
        "compute",
        "again",
        "tensor",
        "data",
        "optimizer",
        "idle",
        "sends",
        "receives",
        "peak memory",
        "limit",
    ):
        table.add_column(name, justify="right")
    for worker in forecast.workers:
        limit = worker.memory_limit_bytes
        table.add_row(
            str(worker.worker),
            ", ".join(map(str, worker.stages)),
            format_s(worker.compute_s),
            _some(worker.recompute_s),
            _some(worker.tensor_s),
            _some(worker.data_s),
            _some(worker.optimizer_s),
            f"{format_s(worker.idle_s)} ({worker.idle_s / forecast.step_s:.0%})" if forecast.step_s else "–",
            _some(worker.send_s),
            _some(worker.receive_s),
            format_bytes(worker.memory.peak_bytes),
            "–" if limit is None else format_bytes(limit),
            style=None if worker.fits else "red",
        )
    return table


def link_use_table(forecast: Forecast) -> Table:
    """What crosses the links."""
    table = Table(title="links of a pipeline, in a step", box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for name in ("after stage", "workers", "bytes", "busy"):
        table.add_column(name, justify="right")
    for link in forecast.links:
        table.add_row(
            str(link.edge), f"{link.sender} – {link.receiver}", format_bytes(link.num_bytes), format_s(link.busy_s)
        )
    return table


def _some(seconds: float) -> str:
    return format_s(seconds) if seconds > 0 else "–"


def collective_line(one: CollectiveUse) -> str:
    """What goes around a ring, in a sentence."""
    what = "sums of tied weights" if one.axis == "tied" else f"{one.axis} collectives"
    return (
        f"worker {one.worker} gives {format_bytes(one.num_bytes)} to {what} of {one.num_workers} in a step, "
        f"{format_bytes(one.sent_bytes)} on the link to the next of a ring"
    )
