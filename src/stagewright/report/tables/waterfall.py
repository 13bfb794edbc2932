"""Where a recorded step goes, and what stragglers cost, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from stagewright.quantity import format_s
from stagewright.report.tables.trace import share_table
from stagewright.table import Table, number_columns, text_columns
from stagewright.trace.flight_recorder import Call
from stagewright.trace.stragglers.analysis import StragglerAnalysis
from stagewright.trace.waterfall import StepExplanation

K = TypeVar("K", int, str)

_MAX_WORKERS = 64  # rows of a table in the terminal


def explanation_tables(explanation: StepExplanation) -> tuple[Table, ...]:
    """Return the waterfall, and the breakdown of each rank where there are several."""
    tables = [waterfall_table(explanation)]
    if len(explanation.workers) > 1:
        tables.append(share_table(explanation.workers[:_MAX_WORKERS], "by rank"))
    return tuple(tables)


def waterfall_table(explanation: StepExplanation) -> Table:
    """Tabulate the parts of the step, which add up to it."""
    rows = [(row.name, format_s(row.seconds), f"{row.share:.1%}", row.change) for row in explanation.rows]
    rows.append(("step", format_s(explanation.step_s), f"{sum(row.share for row in explanation.rows):.1%}", ""))
    count = len(explanation.workers)
    ranks = "1 rank" if count == 1 else f"mean of {count} ranks ({explanation.mesh})"
    return Table(
        title=f"step {explanation.step} ({explanation.num_steps} recorded), {ranks}",
        columns=(
            *text_columns("part"),
            *number_columns("time", "of the step"),
            *text_columns("what reduces it", wrap=True),
        ),
        rows=tuple(rows),
    )


def straggler_table(analysis: StragglerAnalysis) -> Table:
    """Tabulate the slow-down with only one rank, stage or kind of operation as recorded."""
    rows = [("all", "everything", analysis.slowdown)]
    rows += [("rank", str(rank), value) for rank, value in _largest(analysis.by_rank, 5)]
    rows += [("stage", str(stage), value) for stage, value in _largest(analysis.by_stage, 3)]
    rows += [("kind", kind, value) for kind, value in _largest(analysis.by_kind, 3)]
    return Table(
        title=f"stragglers: a step takes {format_s(analysis.step_s)}, with typical times {format_s(analysis.ideal_s)}",
        columns=(*text_columns("as recorded", "which"), *number_columns("slow-down")),
        rows=tuple((what, which, f"{value:.3f} ×") for what, which, value in rows),
        notes=(
            f"Typical times on the slowest 3 % of the ranks remove {analysis.worker_share:.0%} of the slow-down (M_W), "
            f"on the last stage {analysis.last_stage_share:.0%} (M_S).",
        ),
    )


def calls_table(calls: Mapping[int, Sequence[Call]]) -> Table:
    """Tabulate the collectives of each rank in a dump of the Flight Recorder."""
    rows = []
    for rank in sorted(calls)[:_MAX_WORKERS]:
        for group in dict.fromkeys(call.group for call in calls[rank]):
            own = [call for call in calls[rank] if call.group == group]
            last = own[-1]
            rows.append((str(rank), group, str(len(own)), f"{last.number} {last.name} {last.sizes}", last.where or "–"))
    columns = (
        *number_columns("rank"),
        *text_columns("group"),
        *number_columns("calls"),
        *text_columns("last call", "where", wrap=True),
    )
    return Table(title="collectives of each rank", columns=columns, rows=tuple(rows))


def _largest(values: Mapping[K, float], count: int) -> list[tuple[K, float]]:
    return sorted(values.items(), key=lambda item: -item[1])[:count]
