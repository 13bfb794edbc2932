"""``stagewright fit``: how large it can be."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
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
    RunDtype,
    Seed,
    SequenceLength,
    Units,
)
from stagewright.cli.screen import note, print_json, progress, screen
from stagewright.errors import UnknownName, UsageError
from stagewright.quantity import parse_bytes
from stagewright.zoo.named import catalog as catalogue

if TYPE_CHECKING:
    from stagewright.planner.fit import Fit
    from stagewright.spec.plan import Plan

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
    dtype: RunDtype = None,
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
    if limit < 1:
        raise UsageError(f"--memory {memory}: nothing fits in no memory; write it like 8GiB")
    from stagewright.schedules.catalog import SCHEDULES
    from stagewright.spec.plan import ModelSpec, OptimizerSpec, Plan
    from stagewright.spec.plan_rules import OPTIMIZERS

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
    from stagewright.planner.fit import MEMORY, fit_strategies
    from stagewright.planner.scaled import most_of, sized_models

    def told(plan: Plan, size: int) -> AbstractContextManager[Callable[[int, int, str], None]]:
        return progress(f"measuring {plan.model.name}, {size} samples")

    sized = sized_models(what, head, cache=cache_dir or True, told=told)  # type: ignore[arg-type]
    now = {"batch": batch, "layers": int(layers) if layers.isdigit() else 1, "sequence": sequence_length or 128}[what]
    most = most_of(what, base)  # type: ignore[arg-type]
    rows = fit_strategies(base, devices, limit, sized, what, now=now, microbatches=microbatches, most=most)  # type: ignore[arg-type]
    checked = _run(rows, limit, root) if check else None
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
    from stagewright.report.tables.fit import fit_table

    console = screen()
    console.print(fit_table(rows, f"{model}: the most {what} on {devices} devices of {memory}, by forecast", what))
    for row in rows:
        if row.refused:
            note(f"{row.strategy}: {row.refused}")
    for bound in dict.fromkeys(row.bound for row in rows if row.bound != MEMORY):
        note(f"where nothing is given for one more, memory is not what bounds it: {bound}")
    if checked is not None:
        for line in checked:
            console.print(f"{line['plan']}: {'ran' if line['ran'] else 'did not fit'} ({line['text']})", markup=False)


def _run(rows: list[Fit], limit: int, root: Path) -> list[dict[str, Any]]:
    """The strategy with the largest size, at it and, where memory bounds it, a tenth above, held to the limit."""
    from stagewright.engine.jobs.compare import run_plan
    from stagewright.errors import RunError
    from stagewright.machine.machine import default_devices

    best = max((row for row in rows if row.plan is not None), key=lambda row: row.largest, default=None)
    if best is None or best.plan is None:
        raise UsageError("nothing fits, so that there is nothing to run: give more --memory")
    found = []
    for plan, size, where in (
        (best.plan, best.largest, "at the limit"),
        (best.past, best.past_size, "past it"),
    ):
        if plan is None:
            continue
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
