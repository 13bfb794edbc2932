"""Lists of names, this machine, and its links as tables."""

from __future__ import annotations

from collections.abc import Mapping

from stagewright.machine.link_fit import MeasuredLink
from stagewright.machine.machine import Machine
from stagewright.quantity import format_bytes, format_s
from stagewright.table import Table, number_columns, text_columns


def name_table(kind: str, descriptions: Mapping[str, str]) -> Table:
    """Tabulate names of one kind with a line of description each."""
    columns = (*text_columns(kind), *text_columns("description", wrap=True))
    return Table(columns=columns, rows=tuple(descriptions.items()))


def machine_table(machine: Machine) -> Table:
    """Tabulate what the machine has, one property per row."""
    rows = [
        ("system", machine.system),
        ("processor", machine.processor),
        ("cores", _describe_cores(machine)),
        ("memory", "unknown" if machine.memory_bytes is None else format_bytes(machine.memory_bytes)),
    ]
    rows += [(f"cuda:{gpu.index}", f"{gpu.name}, {format_bytes(gpu.memory_bytes)}") for gpu in machine.gpus]
    if not machine.gpus:
        rows.append(("GPUs", "none that torch can use"))
    rows.append(("backends", ", ".join(machine.backends) or "none"))
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items())))
    return Table(columns=(*text_columns(""), *text_columns("", wrap=True)), rows=tuple(rows))


def _describe_cores(machine: Machine) -> str:
    num_cores, num_threads = len(machine.separate_cores), len(machine.cores)
    text = str(num_cores) if num_cores == num_threads else f"{num_cores} with {num_threads} hyper-threads"
    if machine.core_quota is not None:
        text += f", of which {machine.core_quota:g} may be used at a time"
    return text + (", workers are pinned" if machine.can_pin else ", workers can't be pinned")


def link_table(measured: MeasuredLink) -> Table:
    """Tabulate measured message times next to those of the fitted latency and bandwidth."""
    link = measured.link
    pinning = "the two ends were not pinned to separate cores, so times vary"
    return Table(
        title=f"link through {measured.backend}: latency {format_s(link.latency_s)}, "
        f"bandwidth {format_bytes(link.bandwidth_bytes_per_s)}/s",
        columns=number_columns("message", "time", "spread", "by latency and bandwidth", "messages timed"),
        rows=tuple(
            (
                format_bytes(point.num_bytes),
                format_s(point.median_s),
                format_s(point.spread_s),
                format_s(link.message_s(point.num_bytes)),
                str(point.num_messages),
            )
            for point in measured.points
        ),
        notes=() if measured.pinned else (pinning,),
    )
