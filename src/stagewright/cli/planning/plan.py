"""``stagewright plan``: search for the best plan and write it."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.options import (
    CacheDir,
    ImageSize,
    Json,
    ModelName,
    NumClasses,
    Repeats,
    Seed,
    SequenceLength,
    Units,
)
from stagewright.cli.planning.options import ClusterFile, Fresh, Innermost, Rescale
from stagewright.cli.screen import note, print_json, progress, screen
from stagewright.errors import UsageError
from stagewright.quantity import format_age
from stagewright.zoo.named import catalog as catalogue

if TYPE_CHECKING:
    from stagewright.cluster.cluster import Cluster
    from stagewright.planner.costs.source import Source
    from stagewright.simulator.link_codec import LinkCodec
    from stagewright.spec.plan import Plan

__all__ = ["plan"]

_SEARCH = "What to search"


def plan(
    model: ModelName,
    batch: Annotated[int, typer.Option(min=1, help="Samples in a step, over all workers.")] = 256,
    cluster: ClusterFile = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the best plan here, over what is there.",
            show_default="plan.toml, unless it is there or with --json",
        ),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Run the best three here, where they fit.")] = False,
    json: Json = False,
    top: Annotated[int, typer.Option(min=1, help="How many to show.", rich_help_panel=_SEARCH)] = 10,
    schedules: Annotated[
        str, typer.Option(help="Of pipelines, with commas.", show_default="all", rich_help_panel=_SEARCH)
    ] = "",
    recompute: Annotated[
        str, typer.Option(help="Ways to recompute, with commas.", rich_help_panel=_SEARCH)
    ] = "none,always",
    codecs: Annotated[
        str,
        typer.Option(help="To rank on links, with commas; all but none change values.", rich_help_panel=_SEARCH),
    ] = "none",
    optimizer: Annotated[str, typer.Option(help="sgd, adam or adamw.", rich_help_panel=_SEARCH)] = "adamw",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.", rich_help_panel=_SEARCH)] = "float32",
    analytic: Annotated[
        bool,
        typer.Option(
            "--analytic",
            help="From a configuration and the hardware's peak; nothing is built.",
            rich_help_panel=_SEARCH,
        ),
    ] = False,
    efficiency: Annotated[
        float, typer.Option(help="With --analytic: the share of the peak that is reached.", rich_help_panel=_SEARCH)
    ] = 0.5,
    root: Annotated[Path, typer.Option(help="Where run folders of --verify go.")] = Path("runs"),
    image_size: ImageSize = None,
    sequence_length: SequenceLength = None,
    num_classes: NumClasses = None,
    seed: Seed = 0,
    units: Units = "auto",
    rescale: Rescale = False,
    innermost: Innermost = "pipeline",
    repeats: Repeats = 5,
    fresh: Fresh = False,
    cache_dir: CacheDir = None,
) -> None:
    """Search data × tensor × pipeline × micro-batches × schedule × recomputation × shard for the quickest plan."""
    if ":" not in model:
        catalogue.entry(model)
    if output is not None and not output.parent.is_dir():
        raise UsageError(f"can't write {output}: there is no folder {output.parent}; make it first")
    from stagewright.cluster.file import read_cluster
    from stagewright.codecs.name import check_codec
    from stagewright.schedules.catalog import SCHEDULES
    from stagewright.simulator.overheads import EngineTerms
    from stagewright.spec.plan import AXES, ModelSpec, OptimizerSpec, Plan
    from stagewright.spec.plan_rules import DTYPES, OPTIMIZERS, RECOMPUTES

    wanted = [name.strip() for name in (schedules or ",".join(SCHEDULES)).split(",")]
    ways = [name.strip() for name in recompute.split(",")]
    _check("schedule", wanted, SCHEDULES)
    _check("way to recompute", ways, RECOMPUTES)
    _check("optimizer", [optimizer], OPTIMIZERS)
    _check("dtype", [dtype], DTYPES)
    _check("axis", [innermost], AXES)
    names = [name.strip() for name in codecs.split(",")]
    for name in names:
        check_codec(name)
    spec = ModelSpec(
        name=model, image_size=image_size, sequence_length=sequence_length, num_classes=num_classes, seed=seed
    )
    base = Plan(
        model=spec,
        batch=batch,
        units=units,
        dtype=dtype,  # type: ignore[arg-type]
        optimizer=OptimizerSpec(name=optimizer),  # type: ignore[arg-type]
    )
    chosen = read_cluster(cluster) if cluster is not None else None
    terms = EngineTerms()
    source: Source
    if analytic:
        if chosen is None:
            raise UsageError("--analytic needs the hardware: give --cluster FILE")
        source = _analytic(base, chosen, efficiency)
    else:
        source, chosen, terms = _measured(base, chosen, cache_dir, repeats, rescale, fresh)
    from stagewright.engine.parallel.codec_choice import CANDIDATES
    from stagewright.planner.search.search import search
    from stagewright.planner.search.verify import NUM_VERIFIED

    others = CANDIDATES if names == ["none"] else ()
    gc.freeze()  # a search makes many objects; what was imported need not be looked through for each thousand of them
    found = search(
        base,
        source,
        chosen,
        terms,
        top=top,
        schedules=wanted,
        recomputes=ways,
        codecs=_link_codecs(names, source, base),
        beside=_link_codecs(others, source, base),
        innermost=innermost,  # type: ignore[arg-type]
        num_sharp=NUM_VERIFIED if verify else 1,
        progress=note,
    )
    verified = None
    if verify:
        from stagewright.planner.search.verify import verify as run_best

        verified = run_best(found.best, root, cache=cache_dir, progress=note)
    best = found.best[0]
    written = _write(best.plan, output, by_itself=not json)
    if json:
        print_json({**_data(base, found, verified), "written": written})
        return
    from stagewright.report.tables.plan import codec_remark, plan_remarks, plan_table, verified_table

    console = screen()
    title = f"{model}: batch {batch}, {dtype}, {optimizer}, on {chosen.num_devices} devices, forecast"
    console.print(plan_table(found, title))
    if verified is not None:
        console.print(verified_table(verified))
    for line in plan_remarks(found):
        console.print(line, markup=False)
    if others:
        console.print(codec_remark(found), markup=False)
    if not analytic:
        _note_sizes(best.plan, source)


def _write(best: Plan, output: Path | None, *, by_itself: bool) -> str | None:
    """Write the plan where it was asked for, or `by_itself` as plan.toml, where there is none; where it is then."""
    from stagewright.spec.plan_file import write_plan

    path = output or Path("plan.toml")
    if output is None:
        if not by_itself:
            return None
        if path.exists():
            note(f"{path} is there already, so that the best plan was not written: -o {path} writes over it")
            return None
    try:
        write_plan(best, path)
    except UsageError as error:
        if output is not None:
            raise
        note(f"the best plan was not written: {error}; -o FILE writes it elsewhere")
        return None
    note(f"wrote {path}")
    return str(path)


def _check(kind: str, names: list[str], known: Any) -> None:
    from stagewright.errors import UnknownName

    for name in names:
        if name not in known:
            raise UnknownName(kind, name, list(known))


def _link_codecs(names: Iterable[str], source: Source, base: Plan) -> dict[str, LinkCodec]:
    """What codecs cost where the model was measured, or by the same formulas as it."""
    from stagewright.planner.costs.analytic import AnalyticModel
    from stagewright.planner.costs.link_codecs import measured_codec

    if isinstance(source, AnalyticModel):
        return {name: source.codec(name) for name in names}
    kind = source.model(1, 1).profile.device.partition(":")[0]
    return {name: measured_codec(name, base.dtype, 1 << 20, kind) for name in names}


def _analytic(base: Plan, cluster: Cluster, efficiency: float) -> Source:
    from stagewright.planner.costs.analytic import AnalyticModel, TransformerShape, peak_of

    if not 0 < efficiency <= 1:
        raise UsageError(f"an efficiency of {efficiency} is not possible: give a number above 0 and up to 1")
    return AnalyticModel(
        name=base.model.name,
        shape=TransformerShape.of(base.model),
        peak=peak_of(cluster),
        kind=cluster.devices[0].kind,
        item_bytes=2 if base.dtype == "bfloat16" else 4,
        efficiency=efficiency,
    )


def _measured(
    base: Plan, cluster: Cluster | None, cache: str | None, repeats: int, rescale: bool, fresh: bool
) -> tuple[Source, Cluster, Any]:
    from stagewright.machine.machine import default_devices, probe_machine, spread_cores
    from stagewright.planner.calibration.calibrate import load_calibration
    from stagewright.planner.costs.measure import MeasuredModel, measure_model
    from stagewright.planner.costs.source import MeasuredSource
    from stagewright.planner.forecast import check_kind

    calibration = load_calibration(cache, progress=note)
    device = default_devices(1)[0]
    if cluster is None:
        machine = probe_machine()
        count = len(machine.gpus) or len(spread_cores())
        share = None if machine.gpus or machine.memory_bytes is None else machine.memory_bytes // count
        share = machine.gpus[0].memory_bytes if machine.gpus else share
        cluster = calibration.cluster(count, share)
    check_kind(device, cluster, rescale)

    def measure(plan: Plan, size: int) -> MeasuredModel:
        layers = f" as one of {plan.mesh.tensor}" if plan.mesh.tensor > 1 else ""
        with progress(f"measuring {plan.model.name}, {size} samples{layers}") as report:
            return measure_model(plan, size=size, cache=cache or True, repeats=repeats, fresh=fresh, progress=report)

    # The largest is what each replica of plain data parallel computes at once, as far as that can be measured soon.
    small = 1 if base.batch < 4 else 2
    large = max(small, min(64, base.batch // min(cluster.num_devices, base.batch)))
    source = MeasuredSource(
        plan=replace(base, devices=(device,)), small=small, large=large, repeats=repeats, measure=measure
    )
    return source, cluster, calibration.terms_on(cluster)


def _note_sizes(best: Plan, source: Source) -> None:
    """Say how the best plan was measured, and whether a forecast of it will be the same."""
    from stagewright.planner.costs.measure import chunk_sizes

    size, tensor = max(chunk_sizes(best)), best.mesh.tensor
    profile = source.model(size, tensor).profile
    if profile.source == "line":
        note(
            f"micro-batches of {size} would take long to measure, so that the best plan is forecast from smaller ones; "
            "`stagewright forecast` measures them"
        )
    elif profile.source == "cache":
        note(f"the best plan's profile was measured {format_age(profile.age_s)} ago; --fresh measures again")


def _data(base: Plan, found: Any, verified: Any) -> dict[str, Any]:
    """The JSON of this verb (documented in docs/json.md)."""

    def row(one: Any) -> dict[str, Any]:
        return {
            "mesh": str(one.plan.mesh),
            "strategy": one.plan.mesh.strategy,
            "microbatches": one.plan.microbatches,
            "schedule": one.plan.schedule,
            "recompute": one.plan.recompute,
            "shard": one.plan.shard,
            "codec": one.codec,
            "cuts": list(one.plan.cuts),
            "step_s": one.forecast.step_s,
            "samples_per_s": one.forecast.samples_per_s,
            "speedup": one.forecast.speedup,
            "peak_memory_bytes": one.forecast.peak_memory_bytes,
            "fits": one.forecast.fits,
            "reason": one.reason,
        }

    return {
        "model": base.model.name,
        "batch": base.batch,
        "dtype": base.dtype,
        "optimizer": base.optimizer.name,
        "best": [row(one) for one in found.best],
        "serial": row(found.serial),
        "data_parallel": None if found.data_parallel is None else row(found.data_parallel),
        "with_codec": None if found.with_codec is None else row(found.with_codec),
        "losers": found.losers,
        "num_plans": found.num_plans,
        "num_exact": found.num_exact,
        "num_unfit": found.num_unfit,
        "seconds": found.seconds,
        "verified": None if verified is None else verified.to_dict(),
    }
