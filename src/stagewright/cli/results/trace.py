"""``stagewright trace``: what every worker of a run did, and where the step went."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.options import CacheDir, Json, NoCache, Repeats, check_output
from stagewright.cli.screen import note, print_json, screen
from stagewright.errors import UsageError

if TYPE_CHECKING:
    from stagewright.runs.run_folder import RunFolder
    from stagewright.simulator.forecast import Forecast
    from stagewright.spec.plan import Plan
    from stagewright.trace.events import Trace
    from stagewright.trace.operators import Comparison, WorkerOperators

__all__ = ["trace"]

_WHAT = "What to show"
_OUT = "What to write"


def trace(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    workers: Annotated[
        list[int] | None,
        typer.Argument(metavar="A B", help="Two workers, with --compare-workers.", show_default=False),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(help="Which step. \\[default: the median one, or that of a fault]", rich_help_panel=_WHAT),
    ] = None,
    forecast: Annotated[
        bool,
        typer.Option("--forecast", help="Beside its forecast; measures the model first.", rich_help_panel=_WHAT),
    ] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Memory over one step.", rich_help_panel=_WHAT)] = False,
    operators: Annotated[
        bool,
        typer.Option(
            "--operators",
            help="Run the plan for one step more with torch's profiler, and show its operators.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    compare_workers: Annotated[
        bool,
        typer.Option("--compare-workers", help="Did two workers execute the same operators?", rich_help_panel=_WHAT),
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw the timeline, or with --memory that (.png, .svg, .pdf).", rich_help_panel=_OUT
        ),
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="For ui.perfetto.dev and chrome://tracing (.json).", rich_help_panel=_OUT),
    ] = None,
    json: Json = False,
    repeats: Repeats = 5,
    no_cache: NoCache = False,
    cache_dir: CacheDir = None,
) -> None:
    """Show what every worker of a run did: a timeline, and a table of where each one's step went."""
    from stagewright.runs.run_folder import RunFolder
    from stagewright.trace.breakdown import breakdown, check_step
    from stagewright.trace.read import read_trace

    if perfetto is not None:
        check_output(perfetto, "--perfetto", "trace.json")
    if picture is not None:
        from stagewright.report.figures.file import check_figure_path

        check_output(picture, "--picture", "trace.svg")
        check_figure_path(picture)
    folder = RunFolder.open(run)
    plan = folder.plan()
    pair = _pair(workers or [], compare_workers, plan)
    found = read_trace(folder, unfinished=True)
    usual = found.median_step if found.unfinished_step is None else found.unfinished_step
    number = usual if step is None else step
    check_step(found, number)
    shares = breakdown(found, number)
    told = _forecast(plan, cache_dir, no_cache, repeats) if forecast else None
    recorded = _operators(folder, plan, again=operators) if operators or pair is not None else None
    comparison = None
    if pair is not None and recorded is not None:
        from stagewright.trace.operators import compare_workers as compare

        comparison = compare(recorded, *pair, plan)
    held = None
    if memory:
        from stagewright.trace.memory import read_memory

        held = read_memory(folder)
    title = _title(plan)
    if picture is not None:
        from stagewright.report.figures.timeline import draw_timeline
        from stagewright.report.timeline import forecast_timeline, trace_timeline

        if held is not None:
            from stagewright.report.figures.trace import draw_memory

            draw_memory(held, picture, f"{title}, memory")
        else:
            timeline = trace_timeline(found, number, f"{title} (measured)")
            draw_timeline(timeline, picture, forecast_timeline(told) if told is not None else None)
        note(f"drawn: {picture}")
    if perfetto is not None:
        from stagewright.trace.perfetto import operator_events, perfetto_events, write_perfetto

        only = None if step is None else [step]
        events = operator_events(recorded) if operators and recorded is not None else perfetto_events(found, only)
        write_perfetto(events, perfetto)
        note(f"wrote {perfetto}: open it in ui.perfetto.dev or chrome://tracing")
    begin_s, end_s = found.spans[number]
    _tell_of_fault(found, plan, number)
    errors = [worker.clock_error_s for worker in found.workers]
    if json:
        content: dict[str, Any] = {
            "run": found.run,
            "model": plan.model.name,
            "mesh": str(plan.mesh),
            "training": plan.training,
            "steps": list(found.steps),
            "step": number,
            "step_s": end_s - begin_s,
            "unfinished": number == found.unfinished_step,
            "clock_error_s": max(errors),
            "workers": [share.to_dict() for share in shares],
            "events": [
                {"worker": worker.rank, **one.to_dict()}
                for worker in found.workers
                for one in worker.events
                if one.step == number
            ],
        }
        if told is not None:
            content["forecast"] = told.to_dict()
        if held is not None:
            content["memory"] = [worker.to_dict() for worker in held]
        if comparison is not None:
            content["comparison"] = comparison.to_dict()
        print_json(content)
        return
    from stagewright.report.tables import trace as tables
    from stagewright.report.timeline import trace_timeline
    from stagewright.report.timeline_text import timeline_text

    console = screen()
    timeline = trace_timeline(found, number, title)
    console.print(tables.share_table(shares, f"{title}: {timeline.caption} (of {found.num_steps} recorded)"))
    for line in timeline_text(timeline, min(console.width, 120)):
        console.print(line, no_wrap=True)
    if told is not None:
        console.print(tables.beside_forecast_table(shares, told, plan.mesh))
    if held is not None:
        from stagewright.trace.memory import peak_sentence

        console.print(tables.memory_table(held))
        console.print(peak_sentence(max(held, key=lambda one: one.peak.total_bytes)), markup=False)
    if operators and recorded is not None:
        for worker in recorded:
            console.print(tables.operator_table(worker))
    if comparison is not None:
        _print_comparison(console, comparison)
    hosts = sorted({worker.host for worker in found.workers})
    if len(hosts) > 1:
        note(f"clocks of {len(hosts)} machines were brought together to ± {max(errors) * 1e6:.0f} µs")


def _tell_of_fault(found: Trace, plan: Plan, number: int) -> None:
    """What a trace of a failed run lacks."""
    missing = [rank for rank in range(plan.mesh.num_workers) if rank not in {one.rank for one in found.workers}]
    for rank in missing:
        note(f"worker {rank} left no events: it was killed, or failed before the end of its first recorded step")
    if number == found.unfinished_step:
        note(f"the run failed in step {number}: what is shown ends there; --step shows another")
        for worker in found.workers:
            if worker.step(number) is None:
                last = max(set(worker.steps).intersection(found.steps), default=None)
                shown = "" if last is None else f"; --step {last} shows it in its last whole step"
                note(f"worker {worker.rank} was killed: what it did in step {number} is not known{shown}")


def _print_comparison(console: Any, found: Comparison) -> None:
    from stagewright.report.tables.trace import comparison_lines, comparison_table

    console.print(comparison_table(found))
    for line in comparison_lines(found):
        style = {"-": "red", "+": "green", "@": "bold", "…": "dim"}.get(line[0])
        console.print(line, style=style, markup=False)
    console.print(f"{found.sentence[:1].upper()}{found.sentence[1:]}.", markup=False)


def _pair(workers: list[int], wanted: bool, plan: Plan) -> tuple[int, int] | None:
    """The two workers to compare; None: not asked for."""
    if not wanted:
        if workers:
            raise UsageError(
                f"workers {' '.join(map(str, workers))} are for --compare-workers; add it, or leave them out"
            )
        return None
    if len(workers) not in (0, 2):
        raise UsageError(f"--compare-workers compares two workers, not {len(workers)}; write --compare-workers 0 1")
    if plan.mesh.num_workers == 1:
        raise UsageError("the run has one worker, so there is none to compare it with; run the plan on two or more")
    first, second = workers or (0, 1)
    for rank in (first, second):
        if not 0 <= rank < plan.mesh.num_workers:
            raise UsageError(f"there is no worker {rank}; the run has workers 0 to {plan.mesh.num_workers - 1}")
    if first == second:
        raise UsageError(f"worker {first} can't be compared with itself; name two, like --compare-workers 0 1")
    return first, second


def _operators(folder: RunFolder, plan: Plan, *, again: bool) -> tuple[WorkerOperators, ...]:
    """The operators of every worker, recorded now if that is asked for or was never done."""
    from stagewright.trace.operators import read_operators

    missing = any(
        not (folder.path / "workers" / str(rank) / "operators.jsonl").is_file() for rank in range(plan.mesh.num_workers)
    )
    if again or missing:
        from stagewright.engine.jobs.operators import record_operators

        note(f"running the plan of {folder.path} for one step more, with torch's profiler …")
        record_operators(folder)
    return read_operators(folder)


def _forecast(plan: Plan, cache: str | None, no_cache: bool, repeats: int) -> Forecast:
    from stagewright.cli.planning.options import prepared_from

    if not plan.training:
        note("the forecast is of one batch; what was measured is a stream of them")
    return prepared_from(
        plan, cluster=None, rescale=False, innermost="pipeline", cache=cache, no_cache=no_cache, repeats=repeats
    ).forecast()


def _title(plan: Plan) -> str:
    order = plan.schedule if plan.training else "forward alone"
    chunks = f", {order}, {plan.microbatches} micro-batches" if plan.mesh.pipeline > 1 else ""
    many = f" on {plan.mesh.num_workers} workers" if plan.mesh.num_workers > 1 else ""
    return f"{plan.model.name}: {plan.mesh.strategy}{many}{chunks}"
