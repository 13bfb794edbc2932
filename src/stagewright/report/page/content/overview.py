"""The first sections: what was run, the runs side by side, and in what their plans differ."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.quantity import format_bytes, format_s
from stagewright.report.page.content.runs import RunData, differences, flat_plan
from stagewright.report.page.sections import Code, Fold, Section, Table
from stagewright.report.tables.compare import refusal_reason, sent_bytes
from stagewright.report.tables.loss_notes import loss_notes
from stagewright.report.tables.parity_note import unequal_sentence

__all__ = ["compare_section", "overview_section", "plans_section"]


def overview_section(runs: Sequence[RunData]) -> Section:
    """A row a run: what, when, and how it ended."""
    rows = []
    for run in runs:
        plan = run.plan
        chunks = f"{plan.batch} in {plan.microbatches}" if plan.microbatches > 1 else str(plan.batch)
        what = f"{'training' if plan.training else 'inference'}, {plan.dtype}"
        rows.append(
            (
                run.label,
                plan.model.name,
                f"{plan.task} ({what})" if plan.task else what,
                f"{plan.mesh.num_workers}: {', '.join(plan.devices) or 'chosen at the start'}",
                chunks,
                plan.schedule if plan.mesh.pipeline > 1 else "–",
                run.status,
                str(run.environment.get("begun", "–"))[:19].replace("T", " "),
            )
        )
    head = ("run", "model", "what", "workers", "batch", "schedule", "ended", "begun")
    failures = [_why_none(run) for run in runs if run.result.get("error")]
    going = [run.label for run in runs if run.status == "unfinished"]
    if going:
        failures.append(f"{', '.join(going)}: there is no result; the run goes on, or was killed.")
    folders = Table(head=("run", "folder"), rows=tuple((run.label, str(run.folder.path)) for run in runs))
    return Section(
        name="what",
        title="What was run",
        prose=tuple(failures),
        items=(Table(head=head, rows=tuple(rows)), Fold(title="Run folders", items=(folders,))),
    )


def _why_none(run: RunData) -> str:
    """Why a run has no figures: what was asked for can't be, or what was right went wrong."""
    error = str(run.result["error"])
    if run.status == "refused":
        return f"{run.label} was refused, it can't be run: {refusal_reason(error)}"
    return f"{run.label} {run.status}: {error}"


def compare_section(runs: Sequence[RunData]) -> Section | None:
    """The figures that count, one row a run."""
    timed = [run for run in runs if run.is_timed]
    if not timed:
        return None
    rows, remarks = [], []
    several = len({run.serial for run in timed if run.serial}) > 1
    for run in timed:
        result, speedup = run.result, run.speedup
        bound, sent = float(result["bound"]), sent_bytes(result)
        spread = 50 * result["samples_per_s_spread"] / result["samples_per_s"]
        rows.append(
            (
                run.label,
                f"{result['samples_per_s']:.1f} ±{spread:.0f}%",
                format_s(result["latency_s"]),
                "–" if speedup is None else f"{speedup:.2f} ×",
                *([run.serial or "–"] if several else []),
                f"{bound:.2f} ×",
                "–" if speedup is None else f"{speedup / bound:.0%}",
                format_bytes(max(result["peak_memory_bytes"])),
                format_bytes(sent) if sent else "–",
                "yes" if result["equal"] else "NO",
            )
        )
        if not result["equal"]:
            remarks.append(_unequal(run))
    for name in dict.fromkeys(run.plan.model.name for run in timed):
        notes = loss_notes([run.result for run in timed if run.plan.model.name == name])
        remarks += [f"Of {name}: {line}." for line in notes]
    if all(run.serial_s is None for run in timed):
        remarks.append(
            "There is no speed-up: no serial run of the same batch is on the page or beside these runs; "
            f"make one with: stagewright compare {timed[0].plan.model.name} --strategies serial "
            f"--batch {timed[0].plan.batch}"
        )
    head = ("run", "samples/s", "step", "speed-up", *(["over"] if several else []), "bound", "of the bound")
    head = (*head, "peak memory", "sent a step", "equal")
    note = (
        "Speed-up is over the serial run of the same comparison (the same model, batch, dtype and kind of device; of "
        "several the last before it), and only for runs that were proven equal to it. The bound is what "
        "the plan can give at best: n, less what filling and draining a pipeline takes. Memory is that of the worker "
        "that needs most; ± is half of what the middle half of the steps spans."
    )
    return Section(
        name="compare",
        title="Side by side",
        prose=tuple(remarks),
        items=(
            Table(
                head=head,
                rows=tuple(rows),
                right=frozenset(range(1, len(head) - 1)) - ({4} if several else set()),
                note=note,
            ),
        ),
    )


def _unequal(run: RunData) -> str:
    return f"{unequal_sentence(run.label, run.result['equality'])}."


def plans_section(runs: Sequence[RunData]) -> Section:
    """What differs between the plans, marked; then all that is the same."""
    from stagewright.spec.plan_file import plan_to_toml

    files = tuple(Code(title=run.label if len(runs) > 1 else "", text=plan_to_toml(run.plan)) for run in runs)
    whole = Fold(title="The plan's file" if len(runs) == 1 else "The plans' files", items=files)
    flat = [flat_plan(run.plan) for run in runs]
    differ, same = differences([run.plan for run in runs])
    if len(runs) == 1:
        values = Table(head=("key", "value"), rows=tuple((key, flat[0][key]) for key in same))
        return Section(name="plans", title="Plan", items=(values, whole))
    head = ("key", *(run.label for run in runs))
    rows = tuple((key, *(one.get(key, "–") for one in flat)) for key in differ)
    alike = Table(head=("key", "value"), rows=tuple((key, flat[0][key]) for key in same))
    prose = (
        f"The plans differ in {len(differ)} keys, and are the same in {len(same)}."
        if differ
        else "The plans are the same."
    )
    shown = (Table(head=head, rows=rows, marked=frozenset(range(len(rows)))),) if rows else ()
    common = (Fold(title=f"The same in all runs ({len(same)} keys)", items=(alike,)),) if same else ()
    return Section(
        name="plans",
        title="What differs in the plans",
        prose=(prose,),
        items=(*shown, *common, whole),
    )
