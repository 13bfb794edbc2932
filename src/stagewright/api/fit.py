"""``sw.fit``: find the largest model, batch or sequence that fits in memory under each strategy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stagewright.analytic.models import load_shape
from stagewright.api.inputs import check_names, load_cluster, split_options
from stagewright.api.progress import SILENT, Progress
from stagewright.cluster.cluster import Cluster
from stagewright.display import Displayed
from stagewright.engine.jobs.compare import run_plan
from stagewright.errors import RunError, UsageError
from stagewright.machine.machine import default_devices
from stagewright.planner.fit import MEMORY, SizeKind, StrategyFit, fit_strategies, memory_of
from stagewright.planner.scaled_models import analytic_memory, scaled_models, size_limit
from stagewright.planner.search.by_unit import memory_by_unit
from stagewright.quantity import parse_bytes
from stagewright.schedules.rules import FIXED_SCHEDULES
from stagewright.spec.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS
from stagewright.spec.plan import ModelSpec, OptimizerSpec, Plan
from stagewright.zoo.named import catalog

_SIZES = ("batch", "layers", "sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult(Displayed):
    """The largest size of each strategy, without activation checkpointing, with it, and with recomputed units."""

    model: str
    what: str
    """What grows: batch, layers or sequence."""
    devices: int
    memory_bytes: int
    """Memory of each device."""
    rows: tuple[StrategyFit, ...]
    checked: tuple[dict[str, Any], ...] | None = None
    """What happened when the best strategy ran at its limit and just above it."""

    @property
    def notes(self) -> list[str]:
        """Why strategies were refused, and what bounds a size other than memory."""
        refused = list(dict.fromkeys(f"{row.strategy}: {row.refused}" for row in self.rows if row.refused))
        bounds = dict.fromkeys(row.bound for row in self.rows if row.bound != MEMORY)
        return refused + [f"rows without a next size are not bound by memory: {bound}" for bound in bounds]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of ``stagewright fit --json``."""
        return {
            "model": self.model,
            "what": self.what,
            "memory_bytes": self.memory_bytes,
            "rows": [row.to_dict() for row in self.rows],
            "checked": None if self.checked is None else list(self.checked),
        }


def fit(
    model: str,
    memory: str | int | None = None,
    *,
    devices: int | None = None,
    cluster: Cluster | str | Path | None = None,
    what: SizeKind | None = None,
    batch: int = 8,
    microbatches: int = 4,
    schedule: str = "1f1b",
    optimizer: str = DEFAULT_OPTIMIZER,
    check: bool = False,
    analytic: bool = False,
    cache: str | bool = True,
    root: str | Path = "runs",
    progress: Progress = SILENT,
    **options: Any,
) -> FitResult:
    """Find the most layers, samples or tokens that fit, for each strategy.

    Args:
        model: A name from ``stagewright models``, or ``package.module:factory``.
        memory: Memory of each device, like ``"8GiB"``; None: that of the cluster's smallest.
        devices: How many devices; None: all of the cluster's, or 2 without one.
        cluster: With `analytic`, the devices: a cluster, the path of its file, or a name such as ``8xh100``.
        what: batch, layers or sequence; by default layers where the model's number of layers is free, else batch.
        batch: Global batch, where layers or tokens grow.
        microbatches: Micro-batches of a pipeline.
        schedule: Schedule of a pipeline.
        optimizer: adamw, adam, sgd or rmsprop.
        check: Whether to run the best strategy at its limit and just above it.
        analytic: Whether memory comes from formulas; the model is then a folder with a config.json (``hf:FOLDER``) or a
            name such as ``gpt3-175b``, and is not built.
        cache: The cache folder of profiles; True: the user's.
        root: Where run folders of `check` go.
        progress: Receives notes while the model is measured.
        options: Options of the model (``image_size``, …) and of the plan (``precision``, ``units``).

    Example:
        print(sw.fit("gpt-layers", "1GiB", devices=2, sequence_length=32))
    """
    memory, devices = _limits(memory, devices, cluster, analytic=analytic)
    check_names("size", [what] if what else [], _SIZES)
    check_names("optimizer", [optimizer], OPTIMIZERS)
    check_names("schedule", [schedule], FIXED_SCHEDULES)
    limit = memory if isinstance(memory, int) else parse_bytes(memory)
    if limit < 1:
        raise UsageError(f"--memory {memory}: nothing fits in no memory; write it like 8GiB")
    about, rest = split_options(options)
    base = Plan(
        model=ModelSpec(name=model, **about),
        batch=batch,
        schedule=schedule,  # type: ignore[arg-type]  # checked above
        optimizer=OptimizerSpec(name=optimizer),
        **rest,
    )
    if analytic:
        if check:
            raise UsageError("--check runs the strategy here, but --analytic is for hardware that is not at hand")
        what = what or "batch"
        shape = load_shape(model, base.model.sequence_length)
        now = {"batch": batch, "layers": shape.num_layers, "sequence": shape.sequence_length}[what]
        memory_model = analytic_memory(what, shape)
        rows = fit_strategies(base, devices, limit, memory_model, what, now=now, microbatches=microbatches)
        return FitResult(model=model, what=what, devices=devices, memory_bytes=limit, rows=tuple(rows))
    base = replace(base, steps=1, warmup=0)
    head, _, layers = model.partition(":")
    what = _what_grows(model, what)

    def measuring(plan: Plan, size: int) -> AbstractContextManager[Callable[[int, int, str], None]]:
        return progress.task(f"measuring {plan.model.name}, {size} samples")

    models = scaled_models(what, head, cache=cache, progress=measuring)
    by_unit = memory_by_unit(models, limit)
    now = {
        "batch": batch,
        "layers": int(layers) if layers.isdigit() else 1,
        "sequence": base.model.sequence_length or 128,
    }[what]
    most = size_limit(what, base)
    rows = fit_strategies(
        base, devices, limit, memory_of(models), what, now=now, microbatches=microbatches, limit=most, by_unit=by_unit
    )
    checked = tuple(_run(rows, limit, root, progress)) if check else None
    return FitResult(model=model, what=what, devices=devices, memory_bytes=limit, rows=tuple(rows), checked=checked)


def _limits(
    memory: str | int | None, devices: int | None, cluster: Cluster | str | Path | None, *, analytic: bool
) -> tuple[str | int, int]:
    """Return the memory of a device and the number of devices, from a cluster where they are not stated."""
    where = load_cluster(cluster)
    if where is not None and not analytic:
        raise UsageError("--cluster belongs to an analytic fit: add --analytic, or state --memory and --devices")
    if memory is None and where is not None:
        memory = min((group.memory_bytes for group in where.devices if group.memory_bytes is not None), default=None)
    if memory is None:
        raise UsageError(
            "how much memory has a device? Give --memory 80GiB, or with --analytic a --cluster like 8xh100 "
            "(a cluster's file states memory under [[devices]])"
        )
    if where is not None and devices is not None and devices > where.num_devices:
        raise UsageError(f"--devices {devices}: the cluster has {where.num_devices}")
    return memory, devices or (2 if where is None else where.num_devices)


def _what_grows(model: str, what: SizeKind | None) -> SizeKind:
    """Return what grows, by default layers where their number is free; refuse what the model does not have."""
    head = model.partition(":")[0]
    entry = catalog.entry(head) if ":" not in model or head in catalog.names() else None
    has_free_layers = entry is not None and entry.default_layers is not None
    what = what or ("layers" if has_free_layers else "batch")
    if what == "layers" and not has_free_layers:
        raise UsageError(f"{model} has a fixed number of layers: use --what batch, or a family such as gpt-layers")
    if what == "sequence" and (entry is None or "sequence_length" not in entry.options):
        raise UsageError(f"{model} takes no sequences: use --what batch")
    return what


def _run(rows: list[StrategyFit], limit: int, root: str | Path, progress: Progress) -> list[dict[str, Any]]:
    """Run the strategy with the largest size at its limit and, where memory bounds it, a tenth above."""
    best = max((row for row in rows if row.plan is not None), key=lambda row: row.largest, default=None)
    if best is None or best.plan is None:
        raise UsageError("nothing fits, so there is nothing to run: give more --memory")
    results = []
    for plan, size, where in ((best.plan, best.largest, "at the limit"), (best.past, best.past_size, "above it")):
        if plan is None:
            continue
        devices = default_devices(plan.mesh.num_workers, share=True)
        name = f"{best.strategy}{_describe_recompute(best)}, {size}"
        progress.note(f"running {name} {where} …")
        try:
            result = run_plan(replace(plan, devices=devices, memory_bytes=limit), root)
            text, ran = f"{max(result.peak_memory_bytes)} bytes of {limit}", True
        except RunError as error:
            text, ran = str(error).splitlines()[0], False
        results.append({"plan": name, "size": size, "ran": ran, "text": text})
    return results


def _describe_recompute(row: StrategyFit) -> str:
    if row.by_unit:
        return f", {len(row.recomputed_units)} units recomputed"
    return ", recomputed" if row.recompute else ""
