"""``stagewright explain``: why the speed-up is not n, and what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.option_groups import with_groups
from stagewright.cli.options import Json
from stagewright.cli.planning.options import AnalyticOptions, ClusterFile, ForecastOptions, note_profile
from stagewright.cli.screen import SCREEN, note, print_json, print_lines, print_table


@with_groups
def explain(
    target: Annotated[
        Path | None, typer.Argument(metavar="RUN|PLAN", help="A run folder, or a plan.toml.", show_default=False)
    ] = None,
    cluster: ClusterFile = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the waterfall (.png, .svg, .pdf).")] = None,
    json: Json = False,
    *,
    options: ForecastOptions,
    formulas: AnalyticOptions,
) -> None:
    """Split the gap between n × and the actual speed-up into its causes, and name the change that gains most."""
    if formulas.analytic:
        from stagewright.report.tables.analytic import analytic_advice

        result = formulas.forecast(target, cluster)
        if json:
            print_json(result.to_dict())
            return
        print_table(result.table())
        print_lines(analytic_advice(result))
        return
    target = formulas.require_plan(target)
    if plot is not None:
        from stagewright.report.figures.file import check_figure_path

        check_figure_path(plot)
    from stagewright.api.forecast import explain_target
    from stagewright.api.inputs import load_cluster

    explanation, prepared = explain_target(
        target, load_cluster(cluster), options.what_if(), options.measuring(), SCREEN
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
