"""``stagewright trace``: the timeline of every worker of a run, and where the step time went."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.options import CacheDir, Fresh, Json, Perfetto, Plot, Repeats, check_output, check_plot, panel
from stagewright.cli.results.choose import RunName, open_run
from stagewright.cli.screen import note, print_json, print_table, screen
from stagewright.errors import UsageError

if TYPE_CHECKING:
    from stagewright.runs.run_folder import RunFolder
    from stagewright.simulator.forecast import Forecast
    from stagewright.spec.plan import Plan
    from stagewright.trace.events import Trace
    from stagewright.trace.operators import Comparison, WorkerOperators

_what_option = panel("What to show")


def trace(
    run: RunName = None,
    workers: Annotated[
        list[int] | None, typer.Argument(metavar="A B", help="Two workers, with --compare-workers.", show_default=False)
    ] = None,
    step: Annotated[
        int | None, _what_option(help="Which step. \\[default: the median one, or the one that failed]")
    ] = None,
    forecast: Annotated[
        bool, _what_option("--forecast", help="Compare with the forecast; measures the model first.")
    ] = False,
    show_memory: Annotated[bool, _what_option("--show-memory", help="Memory over one step.")] = False,
    operators: Annotated[
        bool, _what_option("--operators", help="Run one more step under torch's profiler and list its operators.")
    ] = False,
    compare_workers: Annotated[
        bool, _what_option("--compare-workers", help="Compare the operators that two workers executed.")
    ] = False,
    plot: Plot = None,
    perfetto: Perfetto = None,
    json: Json = False,
    repeats: Repeats = 5,
    fresh: Fresh = False,
    cache_dir: CacheDir = None,
) -> None:
    """Show the timeline of every worker of a run, and a breakdown of its step time."""
    from stagewright.trace.breakdown import breakdown, check_step
    from stagewright.trace.read import read_trace

    if perfetto is not None:
        check_output(perfetto, "--perfetto", "trace.json")
    if plot is not None:
        check_output(plot, "--plot", "trace.svg")
        check_plot(plot)
    if compare_workers and run is not None and run.isdigit() and not Path(run).exists():
        workers = [int(run), *(workers or [])]  # --compare-workers 0 1, of the newest run
        run = None
    folder = open_run(run)
    plan = folder.plan()
    pair = _pair(workers or [], compare_workers, plan)
    run_trace = read_trace(folder, unfinished=True)
    default_step = run_trace.median_step if run_trace.unfinished_step is None else run_trace.unfinished_step
    number = default_step if step is None else step
    check_step(run_trace, number)
    shares = breakdown(run_trace, number)
    predicted = _forecast(plan, cache_dir, fresh, repeats) if forecast else None
    executed = _operators(folder, plan, again=operators) if operators or pair is not None else None
    comparison = None
    if pair is not None and executed is not None:
        from stagewright.trace.operators import compare_workers as compare

        comparison = compare(executed, *pair, plan)
    memories = None
    if show_memory:
        from stagewright.trace.memory import read_memory

        memories = read_memory(folder)
    title = _title(plan)
    if plot is not None:
        from stagewright.report.figures.timeline import draw_timeline
        from stagewright.report.timeline import forecast_timeline, trace_timeline

        if memories is not None:
            from stagewright.report.figures.trace import draw_memory

            draw_memory(memories, plot, f"{title}, memory")
        else:
            timeline = trace_timeline(run_trace, number, f"{title} (measured)")
            draw_timeline(timeline, plot, forecast_timeline(predicted) if predicted is not None else None)
        note(f"drawn: {plot}")
    if perfetto is not None:
        from stagewright.simulator.export.chrome import save_chrome_trace
        from stagewright.trace.perfetto import operator_events, perfetto_events

        only = None if step is None else [step]
        events = operator_events(executed) if operators and executed is not None else perfetto_events(run_trace, only)
        save_chrome_trace(events, perfetto)
        note(f"wrote {perfetto}: open it in ui.perfetto.dev or chrome://tracing")
    begin_s, end_s = run_trace.spans[number]
    _note_missing(run_trace, plan, number)
    errors = [worker.clock_error_s for worker in run_trace.workers]
    if json:
        content: dict[str, Any] = {
            "run": run_trace.run,
            "model": plan.model.name,
            "mesh": str(plan.mesh),
            "training": plan.training,
            "steps": list(run_trace.steps),
            "step": number,
            "step_s": end_s - begin_s,
            "unfinished": number == run_trace.unfinished_step,
            "clock_error_s": max(errors),
            "workers": [share.to_dict() for share in shares],
            "events": [
                {"worker": worker.rank, **event.to_dict()}
                for worker in run_trace.workers
                for event in worker.events
                if event.step == number
            ],
        }
        if predicted is not None:
            content["forecast"] = predicted.to_dict()
        if memories is not None:
            content["memory"] = [worker.to_dict() for worker in memories]
        if comparison is not None:
            content["comparison"] = comparison.to_dict()
        print_json(content)
        return
    from stagewright.report.tables import trace as tables
    from stagewright.report.timeline import trace_timeline
    from stagewright.report.timeline_text import timeline_text

    console = screen()
    timeline = trace_timeline(run_trace, number, title)
    print_table(tables.share_table(shares, f"{title}: {timeline.caption} (of {run_trace.num_steps} recorded)"))
    for line in timeline_text(timeline, min(console.width, 120)):
        console.print(line, no_wrap=True)
    if predicted is not None:
        print_table(tables.beside_forecast_table(shares, predicted, plan.mesh))
    if memories is not None:
        from stagewright.trace.memory import peak_sentence

        print_table(tables.memory_table(memories))
        console.print(peak_sentence(max(memories, key=lambda memory: memory.peak.total_bytes)), markup=False)
    if operators and executed is not None:
        for worker in executed:
            print_table(tables.operator_table(worker))
    if comparison is not None:
        _print_comparison(console, comparison)
    hosts = sorted({worker.host for worker in run_trace.workers})
    if len(hosts) > 1:
        note(f"clocks of {len(hosts)} machines are synchronized to ± {max(errors) * 1e6:.0f} µs")


def _note_missing(trace: Trace, plan: Plan, number: int) -> None:
    """Say what the trace of a failed run lacks."""
    traced = {worker.rank for worker in trace.workers}
    for rank in sorted(set(range(plan.mesh.num_workers)) - traced):
        note(f"worker {rank} left no events: it was killed, or failed before the end of its first recorded step")
    if number == trace.unfinished_step:
        note(f"the run failed in step {number}, where this trace ends; --step shows another")
        for worker in trace.workers:
            if worker.step(number) is None:
                last = max(set(worker.steps).intersection(trace.steps), default=None)
                shown = "" if last is None else f"; --step {last} shows its last complete step"
                note(f"worker {worker.rank} was killed: its part of step {number} is unknown{shown}")


def _print_comparison(console: Any, comparison: Comparison) -> None:
    from stagewright.report.tables.trace import comparison_lines, comparison_table

    print_table(comparison_table(comparison))
    for line in comparison_lines(comparison):
        style = {"-": "red", "+": "green", "@": "bold", "…": "dim"}.get(line[0])
        console.print(line, style=style, markup=False)
    console.print(f"{comparison.sentence[:1].upper()}{comparison.sentence[1:]}.", markup=False)


def _pair(workers: list[int], wanted: bool, plan: Plan) -> tuple[int, int] | None:
    """Return the two workers to compare, if any."""
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
    """Return the operators of every worker; record them if asked to, or if they are missing."""
    from stagewright.trace.operators import read_operators

    missing = any(
        not (folder.path / "workers" / str(rank) / "operators.jsonl").is_file() for rank in range(plan.mesh.num_workers)
    )
    if again or missing:
        from stagewright.engine.jobs.operators import record_operators

        note(f"running the plan of {folder.path} for one more step under torch's profiler …")
        record_operators(folder)
    return read_operators(folder)


def _forecast(plan: Plan, cache: str | None, fresh: bool, repeats: int) -> Forecast:
    from stagewright.api.forecast import Measuring, measure_plan
    from stagewright.cli.screen import SCREEN

    if not plan.training:
        note("the forecast is for one batch; the run measured a stream of batches")
    measuring = Measuring(cache=cache or True, fresh=fresh, repeats=repeats)
    return measure_plan(plan, None, measuring, SCREEN).forecast()


def _title(plan: Plan) -> str:
    order = plan.schedule if plan.training else "forward only"
    chunks = f", {order}, {plan.microbatches} micro-batches" if plan.mesh.pipeline > 1 else ""
    many = f" on {plan.mesh.num_workers} workers" if plan.mesh.num_workers > 1 else ""
    return f"{plan.model.name}: {plan.mesh.strategy}{many}{chunks}"
