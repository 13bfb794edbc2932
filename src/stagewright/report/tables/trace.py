"""What workers did, as tables: where a step went, beside its forecast, memory at its peak, operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table

from stagewright.quantity import format_bytes, format_s
from stagewright.spec.plan import Mesh
from stagewright.trace.breakdown import PARTS, WorkerShare
from stagewright.trace.memory import CATEGORIES, WorkerMemory
from stagewright.trace.operators import Comparison, WorkerOperators

if TYPE_CHECKING:
    from stagewright.simulator.forecast import Forecast

__all__ = [
    "beside_forecast_table",
    "comparison_lines",
    "comparison_table",
    "memory_table",
    "operator_table",
    "share_table",
]

_CONTEXT = 2  # lines that both have around those that differ
_MOST_LINES = 40


def share_table(shares: Sequence[WorkerShare], title: str) -> Table:
    """Where each worker's step went; every row adds up."""
    table = _table(title, ("worker", "stages", "step", *PARTS))
    for share in shares:
        parts = [f"{_some(seconds)}{_percent(seconds, share.step_s)}" for seconds in share.parts().values()]
        stages = ", ".join(map(str, share.stages)) or "–"
        table.add_row(str(share.worker), stages, format_s(share.step_s), *parts)
    return table


def beside_forecast_table(shares: Sequence[WorkerShare], forecast: Forecast, mesh: Mesh) -> Table:
    """Measured beside forecast, each in its own column."""
    names = ("step", "computing", "optimiser", "collectives", "waiting and links")
    heads = [f"{name}{how}" for name in names for how in ("", ", forecast")]
    table = _table("measured beside forecast", ("worker", *heads))
    for share in shares:
        told = forecast.workers[mesh.coordinates(share.worker)[2]]
        pairs = (
            (share.step_s, forecast.step_s),
            (share.compute_s - share.optimizer_s, told.compute_s),
            (share.optimizer_s, told.optimizer_s),
            (share.collective_s, told.tensor_s + told.data_s),
            (share.wait_s + share.bubble_s + share.transfer_s, told.idle_s),
        )
        table.add_row(str(share.worker), *(_some(seconds) for pair in pairs for seconds in pair))
    return table


def memory_table(memory: Sequence[WorkerMemory]) -> Table:
    """What each worker held when it held most."""
    table = _table("memory when it was most", ("worker", "peak", *CATEGORIES, "in"))
    for worker in memory:
        peak = worker.peak
        sizes = [format_bytes(getattr(peak, name)) if getattr(peak, name) else "–" for name in CATEGORIES]
        table.add_row(str(worker.rank), format_bytes(peak.total_bytes), *sizes, escape(peak.doing))
    return table


def operator_table(worker: WorkerOperators, most: int = 8) -> Table:
    """The operators that took longest on one worker, those inside others left out."""
    seconds: dict[str, tuple[float, int]] = {}
    for one in worker.operators:
        if one.is_operator and one.depth == 0:
            before, count = seconds.get(one.name, (0.0, 0))
            seconds[one.name] = (before + one.end_s - one.start_s, count + 1)
    total = sum(took for took, _ in seconds.values())
    num = sum(count for _, count in seconds.values())
    table = _table(f"worker {worker.rank}: {num} operators in one step", ("operator", "calls", "time", "of all"))
    ordered = sorted(seconds.items(), key=lambda one: -one[1][0])
    for name, (took, count) in ordered[:most]:
        table.add_row(escape(name), str(count), format_s(took), f"{took / total:.0%}" if total else "–")
    return table


def comparison_table(found: Comparison) -> Table:
    """Two workers' operators, kind by kind."""
    first, second = f"worker {found.first}", f"worker {found.second}"
    heads = ("part", first, second, "same, of one micro-batch", f"more in {first}", f"more in {second}")
    table = _table(f"operators of {first} and {second}, in one step", heads)
    for part in found.parts:
        sides = [
            ", ".join(f"{name} × {count}" for name, count in side[:3]) for side in (part.only_first, part.only_second)
        ]
        more = [", …" if len(side) > 3 else "" for side in (part.only_first, part.only_second)]
        table.add_row(
            part.action,
            str(part.num_first),
            str(part.num_second),
            "all" if part.is_same else str(part.num_same),
            *(escape(side + rest) or "–" for side, rest in zip(sides, more, strict=True)),
        )
    return table


def comparison_lines(found: Comparison) -> list[str]:
    """The aligned difference, without what both have in common far from it."""
    lines: list[str] = []
    for part in found.parts:
        if part.is_same or not any(not line.startswith("  ") for line in part.lines):
            continue
        near = {
            other
            for at, line in enumerate(part.lines)
            if not line.startswith("  ")
            for other in range(at - _CONTEXT, at + _CONTEXT + 1)
        }
        lines.append(f"@@ {part.action}, one micro-batch: {len(part.lines)} lines @@")
        skipped = 0
        for at, line in enumerate(part.lines):
            if at in near:
                lines += [f"  … {skipped} the same …"] * bool(skipped)
                lines.append(line)
                skipped = 0
            else:
                skipped += 1
        lines += [f"  … {skipped} the same …"] * bool(skipped)
    if len(lines) > _MOST_LINES:
        return [*lines[:_MOST_LINES], f"… {len(lines) - _MOST_LINES} lines more; --json has all"]
    return lines


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=escape(title), box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    words = ("stages", "in", "operator", "part")
    for name in columns:
        is_text = name in words or name.startswith("more in")
        table.add_column(escape(name), justify="left" if is_text else "right")
    return table


def _some(seconds: float) -> str:
    return format_s(seconds) if seconds > 0 else "–"


def _percent(seconds: float, whole: float) -> str:
    return f" ({seconds / whole:.0%})" if seconds > 0 and whole > 0 else ""
