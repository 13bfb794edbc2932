"""Traces as tables: the breakdown of a step, its forecast, peak memory, and operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stagewright.quantity import format_bytes, format_s
from stagewright.report.tables.forecast import format_positive
from stagewright.spec.plan import Mesh
from stagewright.table import Table, number_columns, text_columns
from stagewright.trace.breakdown import PARTS, WorkerShare
from stagewright.trace.memory import CATEGORIES, WorkerMemory
from stagewright.trace.operators import Comparison, PartComparison, WorkerOperators

if TYPE_CHECKING:
    from stagewright.simulator.forecast import Forecast

_CONTEXT_LINES = 2  # common lines around those that differ
_MAX_LINES = 40
_MAX_OPERATORS = 8


def share_table(shares: Sequence[WorkerShare], title: str) -> Table:
    """Tabulate the breakdown of each worker's step; the parts of a row add up to the step."""
    rows = []
    for share in shares:
        parts = (f"{format_positive(part)}{_format_percent(part, share.step_s)}" for part in share.parts().values())
        stages = ", ".join(map(str, share.stages)) or "–"
        rows.append((str(share.worker), stages, format_s(share.step_s), *parts))
    columns = (*number_columns("worker"), *text_columns("stages"), *number_columns("step", *PARTS))
    return Table(title=title, columns=columns, rows=tuple(rows))


def beside_forecast_table(shares: Sequence[WorkerShare], forecast: Forecast, mesh: Mesh) -> Table:
    """Tabulate measured and forecast parts of each worker's step."""
    rows = []
    for share in shares:
        worker = forecast.workers[mesh.coordinates(share.worker)[2]]
        pairs = (
            (share.step_s, forecast.step_s),
            (share.compute_s - share.optimizer_s, worker.compute_s),
            (share.optimizer_s, worker.optimizer_s),
            (share.collective_s, worker.tensor_s + worker.data_s),
            (share.wait_s + share.bubble_s + share.transfer_s, worker.idle_s),
        )
        rows.append((str(share.worker), *(format_positive(seconds) for pair in pairs for seconds in pair)))
    names = ("step", "compute", "optimizer", "collectives", "idle and P2P")
    headings = [f"{name}\n{source}" for name in names for source in ("measured", "forecast")]
    return Table(title="Measured and forecast", columns=number_columns("worker", *headings), rows=tuple(rows))


def memory_table(memory: Sequence[WorkerMemory]) -> Table:
    """Tabulate each worker's memory at its peak, by category."""
    rows = []
    for worker in memory:
        peak = worker.peak
        sizes = (format_bytes(getattr(peak, name)) if getattr(peak, name) else "–" for name in CATEGORIES)
        rows.append((str(worker.rank), format_bytes(peak.total_bytes), *sizes, peak.doing))
    columns = (*number_columns("worker", "peak", *CATEGORIES), *text_columns("during"))
    return Table(title="Peak memory", columns=columns, rows=tuple(rows))


def operator_table(worker: WorkerOperators) -> Table:
    """Tabulate the operators that took longest on one worker; operators called by others are not counted."""
    totals: dict[str, tuple[float, int]] = {}
    for operator in worker.operators:
        if operator.is_operator and operator.depth == 0:
            seconds, count = totals.get(operator.name, (0.0, 0))
            totals[operator.name] = (seconds + operator.end_s - operator.start_s, count + 1)
    total_s = sum(seconds for seconds, _ in totals.values())
    num_calls = sum(count for _, count in totals.values())
    longest = sorted(totals.items(), key=lambda item: -item[1][0])[:_MAX_OPERATORS]
    return Table(
        title=f"worker {worker.rank}: {num_calls} operators in one step",
        columns=(*text_columns("operator"), *number_columns("calls", "time", "share")),
        rows=tuple(
            (name, str(count), format_s(seconds), f"{seconds / total_s:.0%}" if total_s else "–")
            for name, (seconds, count) in longest
        ),
    )


def comparison_table(comparison: Comparison) -> Table:
    """Tabulate the operators of two workers, one kind of action per row."""
    first, second = f"worker {comparison.first}", f"worker {comparison.second}"
    return Table(
        title=f"operators of {first} and {second}, in one step",
        columns=(
            *text_columns("action"),
            *number_columns(first, second, "common, per micro-batch"),
            *text_columns(f"only in {first}", f"only in {second}", wrap=True),
        ),
        rows=tuple(
            (
                part.action,
                str(part.num_first),
                str(part.num_second),
                "all" if part.is_same else str(part.num_same),
                _format_counts(part.only_first),
                _format_counts(part.only_second),
            )
            for part in comparison.parts
        ),
    )


def comparison_lines(comparison: Comparison) -> list[str]:
    """Return the aligned difference of two workers' operators, with a few common lines around each change."""
    lines = [line for part in comparison.parts for line in _diff_lines(part)]
    if len(lines) > _MAX_LINES:
        return [*lines[:_MAX_LINES], f"… {len(lines) - _MAX_LINES} more lines; --json has all"]
    return lines


def _diff_lines(part: PartComparison) -> list[str]:
    changed = [index for index, line in enumerate(part.lines) if not line.startswith("  ")]
    if part.is_same or not changed:
        return []
    near = {neighbor for index in changed for neighbor in range(index - _CONTEXT_LINES, index + _CONTEXT_LINES + 1)}
    lines = [f"@@ {part.action}, one micro-batch: {len(part.lines)} lines @@"]
    skipped = 0
    for index, line in enumerate(part.lines):
        if index not in near:
            skipped += 1
            continue
        lines += [f"  … {skipped} common …"] * bool(skipped)
        lines.append(line)
        skipped = 0
    return [*lines, *[f"  … {skipped} common …"] * bool(skipped)]


def _format_counts(counts: Sequence[tuple[str, int]]) -> str:
    text = ", ".join(f"{name} × {count}" for name, count in counts[:3])
    return (text + (", …" if len(counts) > 3 else "")) or "–"


def _format_percent(seconds: float, total_s: float) -> str:
    return f" ({seconds / total_s:.0%})" if seconds > 0 and total_s > 0 else ""
