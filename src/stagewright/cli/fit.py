"""``stagewright fit``: how large it can be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.options import CacheDir, Dtype, ImageSize, Json, ModelName, NumClasses, Seed, SequenceLength, Units
from stagewright.cli.screen import note, print_json, progress, screen
from stagewright.errors import UnknownName, UsageError
from stagewright.quantity import parse_bytes
from stagewright.zoo import catalogue

if TYPE_CHECKING:
    from stagewright.plan.value import Plan
    from stagewright.planner.fit import Fit, SizedModel

__all__ = ["fit"]

_WHATS = ("batch", "layers", "sequence")


def fit(
    model: ModelName,
    memory: Annotated[str, typer.Option(help="Memory of each device, like 8GiB.")],
    devices: Annotated[int, typer.Option(min=1, help="How many.")] = 2,
    what: Annotated[
        str | None, typer.Option(help="batch, layers or sequence. \\[default: layers where they are free, else batch]")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples in a step, where layers or tokens are asked for.")] = 8,
    microbatches: Annotated[int, typer.Option(min=1, help="Of a pipeline.")] = 4,
    schedule: Annotated[str, typer.Option(help="Of a pipeline.")] = "1f1b",
    optimizer: Annotated[str, typer.Option(help="sgd, adam or adamw.")] = "adamw",
    check: Annotated[
        bool, typer.Option("--check", help="Run the best strategy at its limit and just past it, for real.")
    ] = False,
    root: Annotated[Path, typer.Option(help="Where run folders of --check go.")] = Path("runs"),
    json: Json = False,
    image_size: ImageSize = None,
    sequence_length: SequenceLength = None,
    num_classes: NumClasses = None,
    dtype: Dtype = None,
    seed: Seed = 0,
    units: Units = "auto",
    cache_dir: CacheDir = None,
) -> None:
    """Find the most layers, samples or tokens that fit, for each strategy, with and without recomputation."""
    head, _, layers = model.partition(":")
    entry = catalogue.entry(head) if ":" not in model or head in catalogue.names() else None
    free = entry is not None and entry.default_layers is not None
    what = what or ("layers" if free else "batch")
    if what not in _WHATS:
        raise UnknownName("size", what, _WHATS)
    if what == "layers" and not free:
        raise UsageError(f"{model} has a fixed number of layers: use --what batch, or a family such as gpt-layers")
    if what == "sequence" and (entry is None or "sequence_length" not in entry.options):
        raise UsageError(f"{model} takes no sequences: use --what batch")
    limit = parse_bytes(memory)
    from stagewright.plan.check import OPTIMIZERS
    from stagewright.plan.schedules import SCHEDULES
    from stagewright.plan.value import ModelSpec, OptimizerSpec, Plan

    for kind, name, known in (("optimizer", optimizer, OPTIMIZERS), ("schedule", schedule, list(SCHEDULES))):
        if name not in known:
            raise UnknownName(kind, name, known)
    spec = ModelSpec(
        name=model, image_size=image_size, sequence_length=sequence_length, num_classes=num_classes, seed=seed
    )
    base = Plan(
        model=spec,
        batch=batch,
        units=units,
        dtype=dtype or "float32",  # type: ignore[arg-type]
        schedule=schedule,  # type: ignore[arg-type]
        optimizer=OptimizerSpec(name=optimizer),  # type: ignore[arg-type]
        steps=1,
        warmup=0,
    )
    from stagewright.planner.fit import fit_strategies

    sized = _sized(what, head, cache_dir)
    now = {"batch": batch, "layers": int(layers) if layers.isdigit() else 1, "sequence": sequence_length or 128}[what]
    rows = fit_strategies(base, devices, limit, sized, what, now=now, microbatches=microbatches)  # type: ignore[arg-type]
    checked = _run(rows, limit, sized, root) if check else None
    if json:
        print_json(
            {
                "model": model,
                "what": what,
                "memory_bytes": limit,
                "rows": [row.to_dict() for row in rows],
                "checked": checked,
            }
        )
        return
    from stagewright.report.fit_table import fit_table

    console = screen()
    console.print(fit_table(rows, f"{model}: the most {what} on {devices} devices of {memory}, by forecast", what))
    for row in rows:
        if row.refused:
            note(f"{row.strategy}: {row.refused}")
    if checked is not None:
        for line in checked:
            console.print(f"{line['plan']}: {'ran' if line['ran'] else 'did not fit'} ({line['text']})", markup=False)


def _sized(what: str, family: str, cache: str | None) -> SizedModel:
    """Models at any size, each unit by a straight line through two measurements."""
    from stagewright.planner.grow import grown_layers
    from stagewright.planner.measure import MeasuredModel, chunk_sizes, measure_model
    from stagewright.planner.source import MeasuredSource, between

    sources: dict[Any, MeasuredSource] = {}
    lines: dict[Any, MeasuredModel] = {}

    def measure(plan: Plan, size: int) -> MeasuredModel:
        with progress(f"measuring {plan.model.name}, {size} samples") as report:
            return measure_model(plan, size=size, cache=cache or True, repeats=1, progress=report)

    def source(plan: Plan) -> MeasuredSource:
        key = plan.model
        if key not in sources:
            sources[key] = MeasuredSource(plan=plan, small=2, large=4, measure=measure)
        return sources[key]

    def sized(plan: Plan, size: int) -> tuple[Plan, MeasuredModel]:
        if what == "batch":
            chosen = replace(plan, batch=size)
            return chosen, source(plan).model(max(chunk_sizes(chosen)), plan.mesh.tensor)
        samples = max(chunk_sizes(plan))
        if what == "layers":
            # A few layers are measured; more of them are as the middle one is.
            few = max(4, plan.num_stages)
            model = source(replace(plan, model=replace(plan.model, name=f"{family}:{few}"))).model(
                samples, plan.mesh.tensor
            )
            wanted = max(size, plan.num_stages)
            chosen = replace(plan, model=replace(plan.model, name=f"{family}:{wanted}"))
            return chosen, grown_layers(model, wanted)
        ends = []
        for length in (64, 128):
            at = replace(plan, model=replace(plan.model, sequence_length=length))
            key = length, samples, plan.mesh.tensor
            if key not in lines:
                lines[key] = source(at).model(samples, plan.mesh.tensor)
            ends.append(lines[key])
        # Tokens of a sample play the part of samples; attention that keeps its weights grows faster than this line.
        small, large = (
            replace(one, profile=replace(one.profile, batch_size=length), whole=None)
            for one, length in zip(ends, (64, 128), strict=True)
        )
        found = between(small, large, size)
        back = replace(found, profile=replace(found.profile, batch_size=samples))
        return replace(plan, model=replace(plan.model, sequence_length=size)), back

    return sized


def _run(rows: list[Fit], limit: int, sized: SizedModel, root: Path) -> list[dict[str, Any]]:
    """The strategy with the largest size, at it and a tenth above, held to the limit."""
    from stagewright.cluster.machine import default_devices
    from stagewright.engine.compare import run_plan
    from stagewright.errors import RunError

    best = max((row for row in rows if row.plan is not None), key=lambda row: row.largest, default=None)
    if best is None or best.plan is None:
        raise UsageError("nothing fits, so that there is nothing to run: give more --memory")
    found = []
    for size, where in ((best.largest, "at the limit"), (best.largest + max(1, best.largest // 10), "past it")):
        plan = sized(best.plan, size)[0]
        devices = default_devices(plan.mesh.num_workers, share=True)
        name = f"{best.strategy}{', recomputed' if best.recompute else ''}, {size}"
        note(f"running {name} {where} …")
        try:
            result = run_plan(replace(plan, devices=devices, memory_bytes=limit), root)
            text, ran = f"{max(result['peak_memory_bytes'])} bytes of {limit}", True
        except RunError as error:
            text, ran = str(error).splitlines()[0], False
        found.append({"plan": name, "size": size, "ran": ran, "text": text})
    return found
