"""Runs of several strategies as a table, with remarks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stagewright.quantity import format_bytes, format_s
from stagewright.report.tables.notes import codec_label, loss_notes, parity_note
from stagewright.runs.result import CompileReport, RunResult
from stagewright.spec.strategy import sharding_name
from stagewright.table import Cell, Table, number_columns, text_columns

if TYPE_CHECKING:
    from stagewright.api.compare import Comparison
    from stagewright.api.run import Run

_SHORT_STEP_S, _LONG_STEP_S = 0.05, 0.2
"""A baseline step that overheads dominate, and one that is long enough to parallelize."""
_WORKER_PREFIX = re.compile(r"worker \d+( \([^)]*\))? (refused|failed): ")


def comparison_table(comparison: Comparison) -> Table:
    """Tabulate the result of `stagewright.compare`."""
    plan = comparison.plan
    mode = "training" if plan.training else "inference"
    return compare_table(
        comparison.rows, f"{plan.model.name}: {mode}, {plan.precision}, devices {', '.join(plan.devices)}"
    )


def run_table(run: Run) -> Table:
    result, title = run.result, f"{run.plan.model.name}: {run.folder.name}"
    return compare_table([] if result is None or not result.is_timed else [result], title)


def compare_table(rows: Sequence[RunResult], title: str) -> Table:
    """Tabulate one strategy per row; without parity, and where a plan was refused or failed, there is no speed-up."""
    return Table(
        title=title,
        columns=(
            *text_columns("strategy"),
            *number_columns("workers", "batch"),
            *text_columns("schedule"),
            *number_columns("samples/s", "step", "speed-\nup", "of\nbound", "memory", "traffic"),
            *text_columns("parity"),
        ),
        rows=tuple(map(_compare_row, rows)),
    )


def _compare_row(row: RunResult) -> tuple[str | Cell, ...]:
    batch = f"{row.batch} ({row.microbatches})" if row.microbatches > 1 else str(row.batch)
    head = (strategy_label(row), str(row.workers), batch, row.schedule or "–")
    if row.error is not None:
        return (*head, *["–"] * 6, Cell("refused", "warning") if row.refused else Cell("failed", "bad"))
    return (
        *head,
        format_rate(row),
        format_s(row.latency_s),
        "–" if row.speedup is None else f"{row.speedup:.2f} ×",
        _share_of_bound(row.share_of_bound),
        format_bytes(row.max_memory_bytes),
        format_bytes(row.sent_bytes) if row.sent_bytes else "–",
        Cell("ok", "good") if row.equal else Cell("NO", "bad"),
    )


def _share_of_bound(share: float | None) -> str | Cell:
    """Write how much of its bound a speed-up reaches; more than all of it was not measured right."""
    if share is None:
        return "–"
    return Cell(f"{share:.0%}", "warning") if round(share, 2) > 1 else f"{share:.0%}"


def format_rate(row: RunResult) -> str:
    """Format samples/s with its spread over the steps; a single step has none."""
    spread = f" ±{100 * row.relative_spread:.0f}%" if row.samples_per_s_spread > 0 else ""
    return f"{row.samples_per_s:.1f}{spread}"


def strategy_label(row: RunResult) -> str:
    """Name a strategy: ``data, FSDP``."""
    sharding = sharding_name(row.shard, row.zero, row.fsdp_gather, row.fsdp_shards)
    speeds = " : ".join(f"{speed:g}" for speed in row.speeds)
    options = [
        sharding,
        "divided vocabulary" if row.vocab_parallel else "",
        "divided sequence" if row.sequence_parallel else "",
        "optimizer in backward" if row.optimizer_in_backward else "",
        "CUDA graphs" if row.cuda_graphs else "",
        f"speeds {speeds}" if speeds else "",
    ]
    return ", ".join([str(row.strategy), *(option for option in options if option)])


def failure_tracebacks(rows: Sequence[RunResult]) -> list[str]:
    """Return the distinct tracebacks of failed rows; the rest of their messages is in the remarks."""
    errors = [str(row.error) for row in rows if row.error is not None and not row.refused]
    matches = [re.search(r"^Traceback.*|^  File .*", error, re.DOTALL | re.MULTILINE) for error in errors]
    return list(dict.fromkeys(match[0] for match in matches if match is not None))


def collective_label(axis: str) -> str:
    """Name the collectives that ``collective_bytes`` counts under an axis."""
    return "all-reduces of tied weights" if axis == "tied" else f"{axis} collectives"


def compare_remarks(rows: Sequence[RunResult]) -> list[str]:
    """Describe each row in a line: its parity with the baseline, or its error; then notes on loss and batch size."""
    lines = []
    for row in rows:
        label = strategy_label(row)
        if row.error is not None:
            if row.refused:
                lines.append(f"{label} refused: {refusal_reason(str(row.error))}")
                continue
            first, *rest = str(row.error).splitlines()
            lines.append(f"{label} failed: {first}")
            lines.extend(line for line in rest if line.startswith(("  at: ", "  log: ")))
            continue
        assert row.parity is not None
        if not row.equal:
            lines.append(parity_note(label, row.parity))
            continue
        error = row.parity.max_error
        baseline = "streamed baseline" if row.parity.streamed else "baseline"
        match = f"bitwise identical to the {baseline}" if error == 0 else f"matches the {baseline} within {error:.0e}"
        if row.parity.float64_error is not None:
            cause = f"to other steps of {codec_label(row.parity)}" if row.parity.codecs else "at kinks (ReLU) or near 0"
            match += f", and within {row.parity.float64_error:.0e} in float64: the rest is rounding {cause}"
        elif row.parity.undecided is not None:
            match += f" (tolerance {row.parity.tolerance:.0e}, measured with {codec_label(row.parity)}; float64 could "
            match += f"not tell whether this is rounding: {row.parity.undecided})"
        memory = ", ".join(format_bytes(size) for size in row.peak_memory_bytes)
        traffic = [f"{size} P2P over cut {cut}" for cut, size in _format_sizes(row.link_bytes).items()]
        traffic += [f"{size} in {collective_label(axis)}" for axis, size in _format_sizes(row.axis_bytes).items()]
        sent = f"; traffic per step {', '.join(traffic)}" if traffic else ""
        lines.append(f"{label}: {match}; peak memory per worker {memory}{sent}")
        if row.compiled is not None:
            lines.append(f"{label}: {_compile_remark(row.compiled)}")
        if row.replicated:
            lines.append(f"{label}: every worker computes the layers that can't be split: {row.replicated}")
    return lines + [f"note: {line}" for line in (*loss_notes(rows), *_batch_size_notes(rows), *_bound_notes(rows))]


def _compile_remark(compiled: CompileReport) -> str:
    """Describe what was compiled: ``stages compiled: 2 graphs, no graph breaks``."""
    because = f" (not stages: {compiled.reason})" if compiled.reason else ""
    graphs = f"{compiled.graphs} graph{'s' if compiled.graphs != 1 else ''}"
    if not compiled.graph_breaks:
        return f"{compiled.mode} compiled{because}: {graphs}, no graph breaks"
    breaks = f"{compiled.graph_breaks} graph break{'s' if compiled.graph_breaks != 1 else ''}"
    return f"{compiled.mode} compiled{because}: {graphs}, {breaks} ({'; '.join(compiled.break_reasons)})"


def _bound_notes(rows: Sequence[RunResult]) -> list[str]:
    """Name the strategies whose speed-up is beyond its upper bound, and the reason."""
    beyond = [strategy_label(row) for row in rows if round(row.share_of_bound or 0.0, 2) > 1]
    if not beyond:
        return []
    return [
        f"{', '.join(beyond)}: more than the upper bound: the baseline was disturbed, or is less efficient with the "
        "whole batch (caches); --rounds 3 shows which"
    ]


def _batch_size_notes(rows: Sequence[RunResult]) -> list[str]:
    """Suggest a larger batch where strategies are slower than a baseline whose step is very short."""
    baseline = next((row for row in rows if row.strategy == "serial" and row.latency_s), None)
    if baseline is None or baseline.latency_s >= _SHORT_STEP_S:
        return []
    slower = [strategy_label(row) for row in rows if (row.speedup or 1.0) < 0.95]
    if not slower:
        return []
    batch = 2 ** math.ceil(math.log2(baseline.batch * _LONG_STEP_S / baseline.latency_s))
    return [
        f"the baseline's step of {baseline.batch} samples takes only {format_s(baseline.latency_s)}, so launch and "
        f"communication overheads dominate: {', '.join(slower)}; a larger batch says more: --batch {batch}"
    ]


def refusal_reason(error: str) -> str:
    """Return the reason of a refusal without the worker that reported it first."""
    return _WORKER_PREFIX.sub("", error.partition("\n")[0], count=1)


def _format_sizes(sizes: Mapping[str, int]) -> dict[str, str]:
    return {name: format_bytes(size) for name, size in sizes.items() if size}
