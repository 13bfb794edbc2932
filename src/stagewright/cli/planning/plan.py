"""``stagewright plan``: search for the best plan and write it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli import options as opt
from stagewright.cli.planning.options import ANALYTIC_HELP, ClusterFile, Innermost, Rescale
from stagewright.cli.screen import SCREEN, note, print_json, print_lines, print_table
from stagewright.errors import UsageError
from stagewright.exporters.catalog import EXPORTERS
from stagewright.schedules.rules import FIXED_SCHEDULES, SCHEDULES
from stagewright.spec.activation_checkpointing import RECOMPUTES
from stagewright.spec.optimizers import DEFAULT_OPTIMIZER
from stagewright.zoo.named import catalog

if TYPE_CHECKING:
    from stagewright.api.plan import PlanResult
    from stagewright.exporters.config import ExportedConfig

_search_option = opt.panel("Search space")
SCHEDULES_HELP = f"Pipeline schedules; {', '.join(SCHEDULES)}, with commas."


def plan(
    model: opt.ModelName,
    batch: Annotated[int, typer.Option(min=1, help="Global batch: samples in a step.")] = 256,
    cluster: ClusterFile = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File to write; the best plan.",
            show_default="plan.toml, unless it exists or with --json",
        ),
    ] = None,
    export: Annotated[
        str | None,
        opt.choice("tool to export to", EXPORTERS, help="Also write the plan for this tool.", show_default=False),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Run the best; three plans, if they fit here.")] = False,
    json: opt.Json = False,
    top: Annotated[int, _search_option(min=1, help="How many plans to show.")] = 10,
    schedules: Annotated[
        str,
        opt.choices(
            "schedule", SCHEDULES, _search_option, metavar="NAMES", help=SCHEDULES_HELP, show_default="all but searched"
        ),
    ] = "",
    recompute: Annotated[
        str, opt.choices("recompute mode", RECOMPUTES, _search_option, help="Activation checkpointing.")
    ] = "none,always",
    codecs: Annotated[
        str, _search_option(metavar="NAMES", help="Codecs, with commas; all but none change values.")
    ] = "none",
    optimizer: opt.Optimizer = DEFAULT_OPTIMIZER,
    precision: opt.Precision = None,
    compile: opt.Compile = None,
    analytic: Annotated[bool, _search_option("--analytic", help=ANALYTIC_HELP)] = False,
    efficiency: Annotated[
        float | None,
        _search_option(help="Share of the peak that matrix products reach; with --analytic. \\[default: the device's]"),
    ] = None,
    price: Annotated[
        bool, _search_option("--price", help="Rank by the cost of a step, at the cluster's price of a device and hour.")
    ] = False,
    root: opt.Root = Path("runs"),
    image_size: opt.ImageSize = None,
    sequence_length: opt.SequenceLength = None,
    num_classes: opt.NumClasses = None,
    seed: opt.Seed = 0,
    units: opt.Units = "auto",
    rescale: Rescale = False,
    innermost: Innermost = "pipeline",
    repeats: opt.Repeats = 5,
    fresh: opt.Fresh = False,
    cache_dir: opt.CacheDir = None,
) -> None:
    """Search data × tensor × pipeline × micro-batches × schedule × checkpointing × FSDP for the fastest plan."""
    if ":" not in model and not analytic:
        catalog.entry(model)
    if output is not None and not output.parent.is_dir():
        raise UsageError(f"can't write {output}: there is no folder {output.parent}; create it first")
    from stagewright.api.plan import plan as find_plan
    from stagewright.report.tables.plan import codec_remark, plan_remarks, verified_table

    if not analytic:
        opt.announce_cpu()
    names = _names(codecs)
    result = find_plan(
        model,
        cluster=cluster,
        batch=batch,
        verify=verify,
        optimizer=optimizer,
        precision=precision or "float32",
        compile=compile or "none",
        root=root,
        progress=SCREEN,
        image_size=image_size,
        sequence_length=sequence_length,
        num_classes=num_classes,
        seed=seed,
        units=units,
        top=top,
        schedules=_names(schedules) if schedules else FIXED_SCHEDULES,
        recompute=_names(recompute),
        codecs=names,
        analytic=analytic,
        efficiency=efficiency,
        price=price,
        rescale=rescale,
        innermost=innermost,
        repeats=repeats,
        fresh=fresh,
        cache=cache_dir or True,
    )
    written = _write(result, output, default=not json)
    exported = None if export is None else _export(result, export, output)
    if json:
        tools = {} if exported is None else {"exported": exported.to_dict()}
        print_json({**result.to_dict(), "written": written, **tools})
        return
    print_table(result.table())
    if result.verified is not None:
        print_table(verified_table(result.verified))
    print_lines(*plan_remarks(result.search))
    if names == ["none"] and not price:
        print_lines(codec_remark(result.search))
    for text in result.notes:
        note(text)
    if exported is not None:
        print_lines(f"{exported.tool}: {exported.command}", *exported.omitted)


def _write(result: PlanResult, output: Path | None, *, default: bool) -> str | None:
    """Write the best plan to `output`, or by `default` to plan.toml if there is none; return where it is."""
    path = output or Path("plan.toml")
    if output is None:
        if not default:
            return None
        if path.exists():
            note(f"{path} exists, so the best plan was not written: -o {path} overwrites it")
            return None
    try:
        result.write(path)
    except UsageError as error:
        if output is not None:
            raise
        note(f"the best plan was not written: {error}; -o FILE writes it elsewhere")
        return None
    note(f"wrote {path}")
    return str(path)


def _export(result: PlanResult, tool: str, output: Path | None) -> ExportedConfig:
    """Write the best plan for another tool, beside the plan."""
    from stagewright.api.export import export

    config = export(result.best, tool)
    for path in config.write(output.parent if output is not None else Path()):
        note(f"wrote {path}")
    return config


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]
