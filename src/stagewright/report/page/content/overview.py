"""The first sections: the runs, their comparison, and the differences between their plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stagewright.quantity import format_bytes, format_s
from stagewright.report.page.content.runs import RunData, differences, flat_plan
from stagewright.report.page.sections import Code, Fold, Section
from stagewright.report.tables.compare import format_rate, refusal_reason
from stagewright.report.tables.notes import loss_notes, parity_note
from stagewright.table import Cell, Column, Table, number_columns, text_columns


def overview_section(runs: Sequence[RunData]) -> Section:
    """Tabulate the runs with their setup and status."""
    rows = []
    for run in runs:
        plan = run.plan
        batch = f"{plan.batch} in {plan.microbatches}" if plan.microbatches > 1 else str(plan.batch)
        mode = f"{'training' if plan.training else 'inference'}, {plan.precision}"
        rows.append(
            (
                run.label,
                plan.model.name,
                f"{plan.task} ({mode})" if plan.task else mode,
                f"{plan.mesh.num_workers}: {', '.join(plan.devices) or 'chosen at the start'}",
                batch,
                plan.schedule if plan.mesh.pipeline > 1 else "–",
                run.status,
                str(run.environment.get("begun", "–"))[:19].replace("T", " "),
            )
        )
    unfinished = [run.label for run in runs if run.status == "unfinished"]
    prose = f"{', '.join(unfinished)}: no result; the run is still going or was killed."
    headings = ("run", "model", "mode", "workers", "batch", "schedule", "status", "started")
    folders = Table(
        columns=text_columns("run", "folder"), rows=tuple((run.label, str(run.folder.path)) for run in runs)
    )
    return Section(
        name="runs",
        title="Runs",
        prose=(prose,) if unfinished else (),
        items=(
            Table(columns=text_columns(*headings, wrap=True), rows=tuple(rows)),
            Fold(title="Run folders", items=(folders,)),
        ),
    )


def failure_sentence(run: RunData) -> str:
    """Say why a run has no result: the plan is impossible, or it failed."""
    error = str(run.result.error)
    if run.status == "refused":
        return f"{run.label} was refused: {refusal_reason(error)}"
    return f"{run.label} {run.status}: {error}"


def compare_section(runs: Sequence[RunData]) -> Section | None:
    """Tabulate throughput, speed-up, memory and parity of each run."""
    timed = [run for run in runs if run.is_timed]
    if not timed:
        return None
    baselines = list(dict.fromkeys(run.baseline for run in timed if run.baseline))
    has_baselines = len(baselines) > 1
    columns = (
        *text_columns("run"),
        *number_columns("samples/s", "step", "speed-up"),
        *([Column("baseline")] if has_baselines else []),
        *number_columns("bound", "of bound", "peak memory", "traffic per step"),
        *text_columns("parity"),
    )
    remarks = []
    for run in timed:
        if not run.result.equal:
            assert run.result.parity is not None
            remarks.append(f"{parity_note(run.label, run.result.parity)}.")
    for name in dict.fromkeys(run.plan.model.name for run in timed):
        notes = loss_notes([run.result for run in timed if run.plan.model.name == name])
        remarks += [f"{name}: {line}." for line in notes]
    if all(run.baseline_s is None for run in timed):
        remarks.append(
            "No speed-up: there is no single-device baseline of the same batch on this page or in the folder of these "
            f"runs. To run one: stagewright compare {timed[0].plan.model.name} --strategy serial "
            f"--batch {timed[0].plan.batch}"
        )
    named = f", {baselines[0]}" if len(baselines) == 1 else ""
    note = (
        f"Speed-up is over the fastest single-device plan of the same batch{named} (same model, dtype and kind of "
        "device; of its runs the latest that started before), and only for runs verified against it that timed more "
        "than one cold step. The bound is the number of workers, less the pipeline bubble. Memory is that of the "
        "worker that needs most; ± is half the interquartile range of the steps."
    )
    rows = tuple(_compare_row(run, with_baseline=has_baselines) for run in timed)
    table = Table(columns=columns, rows=rows, notes=(note,))
    return Section(name="compare", title="Comparison", prose=tuple(remarks), items=(table,))


def _compare_row(run: RunData, *, with_baseline: bool) -> tuple[str | Cell, ...]:
    result, speedup = run.result, run.speedup
    return (
        run.label,
        format_rate(result),
        format_s(result.latency_s),
        "–" if speedup is None else f"{speedup:.2f} ×",
        *([run.baseline or "–"] if with_baseline else []),
        f"{result.bound:.2f} ×",
        "–" if speedup is None else f"{speedup / result.bound:.0%}",
        format_bytes(result.max_memory_bytes),
        format_bytes(result.sent_bytes) if result.sent_bytes else "–",
        Cell("ok", "good") if result.equal else Cell("NO", "bad"),
    )


_MOST_COLUMNS = 6


def _difference_table(keys: Sequence[str], labels: Sequence[str], plans: Sequence[Mapping[str, str]]) -> Table:
    """Show one column for each plan; with many plans one row for each, or the table would be too wide for a page."""
    lines = [(key, *(plan.get(key, "–") for plan in plans)) for key in keys]
    if len(labels) > _MOST_COLUMNS:
        lines = list(zip(*[("run", *labels), *lines], strict=True))
        columns, rows = text_columns(*lines[0], wrap=True), lines[1:]
    else:
        columns, rows = text_columns("key", *labels, wrap=True), lines
    return Table(columns=columns, rows=tuple(tuple(Cell(text, "strong") for text in line) for line in rows))


def plans_section(runs: Sequence[RunData]) -> Section:
    """Show the keys in which the plans differ, then those that they share."""
    from stagewright.spec.plan_file import plan_to_toml

    files = tuple(Code(title=run.label if len(runs) > 1 else "", text=plan_to_toml(run.plan)) for run in runs)
    plan_files = Fold(title="Plan file" if len(runs) == 1 else "Plan files", items=files)
    flat = [flat_plan(run.plan) for run in runs]
    different, common = differences([run.plan for run in runs])
    common_table = Table(
        columns=text_columns("key", "value", wrap=True), rows=tuple((key, flat[0][key]) for key in common)
    )
    if len(runs) == 1:
        return Section(name="plans", title="Plan", items=(common_table, plan_files))
    prose = (
        f"The plans differ in {len(different)} keys and agree in {len(common)}."
        if different
        else "The plans are identical."
    )
    difference_tables = (_difference_table(different, [run.label for run in runs], flat),) if different else ()
    folds = (Fold(title=f"Common to all runs ({len(common)} keys)", items=(common_table,)),) if common else ()
    return Section(
        name="plans", title="Plan differences", prose=(prose,), items=(*difference_tables, *folds, plan_files)
    )
