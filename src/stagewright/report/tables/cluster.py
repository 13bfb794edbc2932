"""This machine and its links as tables."""

from __future__ import annotations

from rich import box
from rich.markup import escape
from rich.table import Table

from stagewright.machine.link_fit import MeasuredLink
from stagewright.machine.machine import Machine
from stagewright.quantity import format_bytes, format_s

__all__ = ["link_table", "machine_table"]


def machine_table(machine: Machine) -> Table:
    """What the machine has, a row each."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("system", escape(machine.system))
    table.add_row("processor", escape(machine.processor))
    table.add_row("cores", _cores(machine))
    table.add_row("memory", "unknown" if machine.memory_bytes is None else format_bytes(machine.memory_bytes))
    for gpu in machine.gpus:
        table.add_row(f"cuda:{gpu.index}", f"{escape(gpu.name)}, {format_bytes(gpu.memory_bytes)}")
    if not machine.gpus:
        table.add_row("GPUs", "none that torch can use")
    table.add_row("backends", ", ".join(machine.backends) or "none")
    table.add_row("versions", escape(", ".join(f"{name} {version}" for name, version in machine.versions.items())))
    return table


def _cores(machine: Machine) -> str:
    num_cores, num_threads = len(machine.separate_cores), len(machine.cores)
    text = str(num_cores) if num_cores == num_threads else f"{num_cores} with {num_threads} hyper-threads"
    if machine.core_quota is not None:
        text += f", of which {machine.core_quota:g} may be used at a time"
    return text + (", workers are pinned" if machine.can_pin else ", workers can't be pinned")


def link_table(measured: MeasuredLink) -> Table:
    """Measured times of messages beside those of the fitted line."""
    link = measured.link
    table = Table(
        title=f"link through {measured.backend}: latency {format_s(link.latency_s)}, "
        f"bandwidth {format_bytes(link.bandwidth_bytes_per_s)}/s",
        caption=None if measured.pinned else "the ends were not pinned to cores of their own: times wander",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    for name in ("message", "time", "spread", "by latency and bandwidth", "messages timed"):
        table.add_column(name, justify="right")
    for point in measured.points:
        table.add_row(
            format_bytes(point.num_bytes),
            format_s(point.median_s),
            format_s(point.spread_s),
            format_s(link.message_s(point.num_bytes)),
            str(point.num_messages),
        )
    return table
