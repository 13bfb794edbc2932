"""``stagewright explain``: why the speed-up is not n, or where a recorded step goes, and what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.option_groups import with_groups
from stagewright.cli.options import Json, Plot, announce_cpu, check_plot
from stagewright.cli.planning.options import AnalyticOptions, ClusterFile, ForecastOptions, note_profile
from stagewright.cli.screen import SCREEN, note, print_json, print_lines, print_table
from stagewright.errors import UsageError


def _are_traces(targets: list[str]) -> bool:
    from stagewright.trace.flight_recorder import is_flight_recorder
    from stagewright.trace.nccl_inspector.log_file import inspector_logs

    return bool(targets) and all(
        target.endswith((".json", ".json.gz", ".parquet"))
        or is_flight_recorder(Path(target))
        or inspector_logs(Path(target))
        for target in targets
    )


def _only(targets: list[str] | None) -> str | None:
    """Return the one run or plan, if any."""
    if targets is not None and len(targets) > 1:
        raise UsageError(f"explain takes one run or plan, not {len(targets)}: {' '.join(targets[:3])}")
    return targets[0] if targets else None


@with_groups
def explain(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN|PLAN|TRACE...",
            help="A run folder, the beginning of its name, or a plan.toml; or, one file for each rank, traces of the "
            "PyTorch profiler (.json, .json.gz), dumps of the Flight Recorder or logs of NCCL Inspector (or their "
            "folder); or a table of operations (.parquet). "
            "\\[default: the newest run]",
            show_default=False,
        ),
    ] = None,
    cluster: ClusterFile = None,
    plot: Plot = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write; of traces, a page rank by rank."),
    ] = None,
    json: Json = False,
    *,
    options: ForecastOptions,
    formulas: AnalyticOptions,
) -> None:
    """Split the gap between n × and the actual speed-up into its causes, and name the change that gains most.

    Traces of the PyTorch profiler are explained by where their step goes: `stagewright explain trace*.json`.
    """
    if _are_traces(targets or []):
        from stagewright.cli.planning.recorded import explain_recorded

        explain_recorded(targets or [], output, json)
        return
    if output is not None:
        raise UsageError(f"--output {output} needs traces of the PyTorch profiler, one .json file for each rank")
    target = _only(targets)
    if formulas.analytic:
        from stagewright.report.tables.analytic import analytic_advice

        formulas.refuse_measuring(options, plot=plot)
        result = formulas.forecast(None if target is None else Path(target), cluster, options.innermost)
        if json:
            print_json(result.to_dict())
            return
        print_table(result.table())
        print_lines(analytic_advice(result))
        return
    formulas.refuse_layout()
    check_plot(plot)
    from stagewright.api.forecast import explain_target
    from stagewright.api.inputs import load_cluster
    from stagewright.runs.choose import choose_run
    from stagewright.trace.attached import MARKER

    run_or_plan = choose_run(target)
    if str(run_or_plan) != target:
        note(f"run: {run_or_plan}")
    if (run_or_plan / MARKER).is_file():
        from stagewright.cli.planning.recorded import show_recorded
        from stagewright.runs.run_folder import RunFolder
        from stagewright.trace.attached import read_attached

        show_recorded(read_attached(RunFolder(run_or_plan)), None, json)
        return
    announce_cpu()
    explanation, prepared = explain_target(
        run_or_plan, load_cluster(cluster), options.what_if(), options.measuring(), SCREEN
    )
    if plot is not None:
        note(f"drawn: {explanation.plot(plot)}")
    if json:
        plan = explanation.plan
        print_json({"model": plan.model.name, "mesh": str(plan.mesh), **explanation.to_dict()})
        return
    print_table(explanation.table())
    print_lines(f"Best change: {explanation.advice}")
    note_profile(prepared.measured.profile)
