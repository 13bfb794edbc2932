"""``stagewright explain``: why the speed-up is not n."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.options import CacheDir, Json, NoCache, Repeats
from stagewright.cli.planning.options import (
    Bandwidth,
    ClusterFile,
    Devices,
    FreeCommunication,
    Fresh,
    InfiniteDevices,
    Innermost,
    Latency,
    PerfectBalance,
    Rescale,
    note_profile,
    prepared_from,
    what_if,
)
from stagewright.cli.screen import note, print_json, screen
from stagewright.errors import UsageError

__all__ = ["explain"]


def explain(
    what: Annotated[Path, typer.Argument(metavar="RUN|PLAN", help="A run folder, or a plan.toml.", show_default=False)],
    cluster: ClusterFile = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the waterfall (.png, .svg, .pdf).")] = None,
    json: Json = False,
    free_communication: FreeCommunication = False,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    devices: Devices = None,
    infinite_devices: InfiniteDevices = False,
    perfect_balance: PerfectBalance = False,
    rescale: Rescale = False,
    innermost: Innermost = "pipeline",
    repeats: Repeats = 5,
    fresh: Fresh = False,
    no_cache: NoCache = False,
    cache_dir: CacheDir = None,
) -> None:
    """Split the distance between n × and the speed-up of a run or plan into parts, and name the best change."""
    from stagewright.runs.run_folder import RunFolder
    from stagewright.spec.plan_file import read_plan

    if plot is not None:
        from stagewright.report.figures.file import check_figure_path

        check_figure_path(plot)
    run = None
    if what.is_dir():
        run = RunFolder.open(what)
    elif not what.exists():
        raise UsageError(f"there is no run or plan {what}; `stagewright runs` lists the runs")
    changed = free_communication or bandwidth or latency or devices or infinite_devices or perfect_balance
    if run is not None and (changed or cluster is not None):
        raise UsageError("a run is what it was: ask what if of its plan, with " + f"explain {what}/plan.toml")
    prepared = prepared_from(
        run.plan() if run is not None else read_plan(what),
        cluster=cluster,
        rescale=rescale,
        innermost=innermost,
        cache=cache_dir,
        no_cache=no_cache,
        repeats=repeats,
        fresh=fresh,
        every_schedule=True,
    )
    from stagewright.planner.explain import explain_plan, explain_run

    if run is not None:
        found = explain_run(prepared, run)
    else:
        prepared = what_if(
            prepared,
            free_communication=free_communication,
            bandwidth=bandwidth,
            latency=latency,
            devices=devices,
            infinite_devices=infinite_devices,
            perfect_balance=perfect_balance,
        )
        found = explain_plan(prepared, changes=not (free_communication or perfect_balance))
    plan = prepared.plan
    how = "measured" if found.is_measured else "forecast"
    title = f"{plan.model.name}: {plan.mesh.strategy} on {plan.mesh.num_workers} workers, {how}"
    if free_communication or perfect_balance:
        advice = "not looked for: these costs are of no real plan"
    elif found.change is None and found.num_tried == 0:
        advice = "not known: there is no change to be tried that fits"
    elif found.change is None:
        advice = f"none of the {found.num_tried} changes that were tried gains 1 %"
    else:
        advice = f"{found.change.what}: {found.change.gain:+.0%} (forecast)"
    if plot is not None:
        from stagewright.report.figures.waterfall import draw_waterfall

        draw_waterfall(found.parts, plot, title=title, caption=f"what would gain most: {advice}")
        note(f"drawn: {plot}")
    if json:
        print_json({"model": plan.model.name, "mesh": str(plan.mesh), **found.to_dict()})
        return
    from stagewright.report.tables.waterfall import waterfall_table

    console = screen()
    console.print(waterfall_table(found.parts, title))
    console.print(f"What would gain most: {advice}", markup=False)
    note_profile(prepared.measured.profile)
