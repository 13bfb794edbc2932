"""``stagewright explain``: why the speed-up is not n, and what to change."""

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
    measuring_from,
    note_profile,
    what_if_from,
)
from stagewright.cli.screen import SCREEN, note, print_json, print_lines, print_table


def explain(
    target: Annotated[
        Path, typer.Argument(metavar="RUN|PLAN", help="A run folder, or a plan.toml.", show_default=False)
    ],
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
    """Split the gap between n × and the actual speed-up into its causes, and name the change that gains most."""
    if plot is not None:
        from stagewright.report.figures.file import check_figure_path

        check_figure_path(plot)
    from stagewright.api.forecast import explain_target
    from stagewright.api.inputs import load_cluster

    explanation, prepared = explain_target(
        target,
        load_cluster(cluster),
        what_if_from(
            free_communication=free_communication,
            bandwidth=bandwidth,
            latency=latency,
            devices=devices,
            infinite_devices=infinite_devices,
            perfect_balance=perfect_balance,
        ),
        measuring_from(
            rescale=rescale, innermost=innermost, cache=cache_dir, no_cache=no_cache, repeats=repeats, fresh=fresh
        ),
        SCREEN,
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
