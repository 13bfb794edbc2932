"""``stagewright plan``: search for the best plan and write it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli import options as opt
from stagewright.cli.planning.options import ClusterFile, Fresh, Innermost, Rescale
from stagewright.cli.screen import SCREEN, note, print_json, print_lines, print_table
from stagewright.errors import UsageError
from stagewright.zoo.named import catalog

if TYPE_CHECKING:
    from stagewright.api.plan import PlanResult

_search_option = opt.panel("Search space")


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
            help="Write the best plan to this file.",
            show_default="plan.toml, unless it exists or with --json",
        ),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Run the best three on this machine, if they fit.")] = False,
    json: opt.Json = False,
    top: Annotated[int, _search_option(min=1, help="How many plans to show.")] = 10,
    schedules: Annotated[str, _search_option(help="Pipeline schedules, with commas.", show_default="all")] = "",
    recompute: Annotated[str, _search_option(help="Modes of activation checkpointing, with commas.")] = "none,always",
    codecs: Annotated[str, _search_option(help="Codecs on links, with commas; all but none change values.")] = "none",
    optimizer: Annotated[str, _search_option(help="sgd, adam or adamw.")] = "adamw",
    dtype: Annotated[str, _search_option(help="float32 or bfloat16.")] = "float32",
    analytic: Annotated[
        bool, _search_option("--analytic", help="Use formulas and the hardware's peak; no model is built or measured.")
    ] = False,
    efficiency: Annotated[
        float | None,
        _search_option(
            help="With --analytic: the share of the peak that matrix products reach. \\[default: the device's]"
        ),
    ] = None,
    root: Annotated[Path, typer.Option(help="Where run folders of --verify go.")] = Path("runs"),
    image_size: opt.ImageSize = None,
    sequence_length: opt.SequenceLength = None,
    num_classes: opt.NumClasses = None,
    seed: opt.Seed = 0,
    units: opt.Units = "auto",
    rescale: Rescale = False,
    innermost: Innermost = "pipeline",
    repeats: opt.Repeats = 5,
    fresh: Fresh = False,
    cache_dir: opt.CacheDir = None,
) -> None:
    """Search data × tensor × pipeline × micro-batches × schedule × checkpointing × FSDP for the fastest plan."""
    if ":" not in model:
        catalog.entry(model)
    if output is not None and not output.parent.is_dir():
        raise UsageError(f"can't write {output}: there is no folder {output.parent}; create it first")
    from stagewright.api.plan import plan as find_plan
    from stagewright.report.tables.plan import codec_remark, plan_remarks, verified_table
    from stagewright.schedules.rules import SCHEDULES

    names = _names(codecs)
    result = find_plan(
        model,
        cluster=cluster,
        batch=batch,
        verify=verify,
        optimizer=optimizer,
        dtype=dtype,
        root=root,
        progress=SCREEN,
        image_size=image_size,
        sequence_length=sequence_length,
        num_classes=num_classes,
        seed=seed,
        units=units,
        top=top,
        schedules=_names(schedules) if schedules else tuple(SCHEDULES),
        recompute=_names(recompute),
        codecs=names,
        analytic=analytic,
        efficiency=efficiency,
        rescale=rescale,
        innermost=innermost,
        repeats=repeats,
        fresh=fresh,
        cache=cache_dir or True,
    )
    written = _write(result, output, default=not json)
    if json:
        print_json({**result.to_dict(), "written": written})
        return
    print_table(result.table())
    if result.verified is not None:
        print_table(verified_table(result.verified))
    print_lines(*plan_remarks(result.search))
    if names == ["none"]:
        print_lines(codec_remark(result.search))
    for text in result.notes:
        note(text)


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


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]
