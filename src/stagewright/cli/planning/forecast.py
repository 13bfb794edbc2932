"""``stagewright forecast``: predict a plan's step, on this machine or on another cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.option_groups import with_groups
from stagewright.cli.options import ChakraOut, Json, Perfetto, Plot, announce_cpu, check_plot
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
    chakra_out: ChakraOut = None,
    from_torchtitan: Annotated[
        Path | None,
        typer.Option(
            "--from-torchtitan", metavar="FILE", help="Forecast a torchtitan job file by formulas; needs --cluster."
        ),
    ] = None,
    json: Json = False,
    *,
    options: ForecastOptions,
    formulas: AnalyticOptions,
) -> None:
    """Predict a plan's step: time, speed-up, timeline of every worker, memory, bytes sent."""
    if from_torchtitan is not None:
        if plan is not None:
            raise UsageError(f"give either {plan} or --from-torchtitan {from_torchtitan}")
        _print_torchtitan(from_torchtitan, cluster, formulas, json=json)
        return
    if formulas.analytic:
        formulas.refuse_measuring(options, plot=plot, perfetto=perfetto, chakra_out=chakra_out)
        _print_analytic(formulas.forecast(plan, cluster, options.innermost), json=json)
        return
    from stagewright.spec.plan_file import read_plan

    wanted = read_plan(formulas.require_plan(plan))
    for path, option in ((plot, "--plot"), (perfetto, "--perfetto"), (chakra_out, "--chakra-out")):
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"{option} {path}: there is no folder {path.parent}; create it first")
    check_plot(plot)
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
    if chakra_out is not None:
        from stagewright.simulator.export.chakra import write_chakra

        written = write_chakra(prepared.costs, chakra_out)
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


def _print_torchtitan(path: Path, cluster: Path | None, formulas: AnalyticOptions, *, json: bool) -> None:
    """Print what a torchtitan job would give, and what would be faster on the same devices."""
    from stagewright.analytic.forecast import forecast_layout
    from stagewright.analytic.models import load_shape
    from stagewright.analytic.torchtitan import better_layouts, read_torchtitan, torchtitan_changes
    from stagewright.api.inputs import load_cluster
    from stagewright.quantity import format_bytes, format_s

    if cluster is None:
        raise UsageError("--from-torchtitan needs the hardware: --cluster 8xh100, or a cluster file")
    where = load_cluster(cluster)
    assert where is not None
    job = read_torchtitan(path, where.num_devices)
    model = formulas.model or job.model
    if model is None:
        raise UsageError(f"the model of {path} is unknown; give --model, a name like llama-3-8b or a config.json")
    shape = load_shape(model, formulas.sequence_length or job.sequence_length)
    current = forecast_layout(shape, job.layout, where)
    better = better_layouts(shape, job.layout, where)
    if json:
        best = (
            None if not better else {"change": torchtitan_changes(job.layout, better[0][0]), **better[0][1].to_dict()}
        )
        print_json({**current.to_dict(), "better": best})
        return
    _print_analytic(current, json=False)
    if not better:
        print_lines("Better: no other layout of these devices and this batch is forecast to be faster")
        return
    layout, forecast_of = better[0]
    gain = 1 - forecast_of.step_s / current.step_s
    print_lines(
        f"Better: {torchtitan_changes(job.layout, layout)}: {format_s(forecast_of.step_s)} a step ({gain:.0%} less), "
        f"MFU {forecast_of.mfu:.0%}, {format_bytes(forecast_of.peak_memory_bytes)} a device (forecast)"
    )
