"""``stagewright forecast``: predict a plan's step, on this machine or on another cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.option_groups import with_groups
from stagewright.cli.options import Json, Perfetto, Plot, announce_cpu, files_option
from stagewright.cli.planning.options import AnalyticOptions, ClusterFile, ForecastOptions, note_profile
from stagewright.cli.screen import SCREEN, note, note_coverage, print_json, print_lines, print_table, screen
from stagewright.errors import UsageError

if TYPE_CHECKING:
    from stagewright.analytic.forecast import AnalyticForecast


@with_groups
def forecast(
    plan: Annotated[Path | None, typer.Argument(metavar="PLAN", help="A plan.toml.", show_default=False)] = None,
    cluster: ClusterFile = None,
    plot: Plot = None,
    perfetto: Perfetto = None,
    chakra: Annotated[
        Path | None, files_option(metavar="PREFIX", help="Chakra execution traces, PREFIX.RANK.et.")
    ] = None,
    json: Json = False,
    *,
    options: ForecastOptions,
    formulas: AnalyticOptions,
) -> None:
    """Predict a plan's step: time, speed-up, timeline of every worker, memory, bytes sent."""
    if formulas.analytic:
        _print_analytic(formulas.forecast(plan, cluster, options.innermost), json=json)
        return
    from stagewright.spec.plan_file import read_plan

    wanted = read_plan(formulas.require_plan(plan))
    for path, option in ((plot, "--plot"), (perfetto, "--perfetto"), (chakra, "--chakra")):
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"{option} {path}: there is no folder {path.parent}; create it first")
    if plot is not None:
        from stagewright.report.figures.file import check_figure_path

        check_figure_path(plot)
    from stagewright.api.forecast import measure_plan
    from stagewright.api.inputs import load_cluster

    announce_cpu()
    what_if = options.what_if()
    prepared = what_if.apply(measure_plan(wanted, load_cluster(cluster), options.measuring(), SCREEN))
    result = prepared.forecast()
    if not result.segments:
        from stagewright.simulator.simulate import MAX_SEGMENTS

        without = f"a step of more than {MAX_SEGMENTS:,} actions and messages has no timeline"
        for path, option in ((plot, "--plot"), (perfetto, "--perfetto")):
            if path is not None:
                raise UsageError(
                    f"{option} {path}: {without}; use fewer micro-batches or stages, or leave out {option}"
                )
        note(without)
    if plot is not None:
        note(f"drawn: {result.plot(plot)}")
    if perfetto is not None:
        from stagewright.simulator.export.chrome import write_chrome_trace

        write_chrome_trace(result, perfetto)
        note(f"wrote {perfetto}: open it in ui.perfetto.dev or chrome://tracing")
    if chakra is not None:
        from stagewright.simulator.export.chakra import write_chakra

        written = write_chakra(prepared.costs, chakra)
        note(f"wrote {len(written)} traces: {written[0]} …")
    if json:
        print_json(result.to_dict())
        return
    from stagewright.report.tables.forecast import collective_line, forecast_summary, link_use_table
    from stagewright.report.timeline import forecast_timeline
    from stagewright.report.timeline_text import timeline_text

    console = screen()
    print_table(result.table())
    if result.links:
        print_table(link_use_table(result))
    print_lines(*(collective_line(use) for use in result.collectives))
    for line in timeline_text(forecast_timeline(result), min(console.width, 120)):
        console.print(line, no_wrap=True)
    print_lines(forecast_summary(result))
    note_profile(prepared.measured.profile)
    note_coverage(prepared.measured.profile.coverage)


def _print_analytic(result: AnalyticForecast, *, json: bool) -> None:
    from stagewright.report.tables.analytic import analytic_summary, memory_table

    if json:
        print_json(result.to_dict())
        return
    print_table(result.table())
    print_table(memory_table(result))
    print_lines(*analytic_summary(result))
