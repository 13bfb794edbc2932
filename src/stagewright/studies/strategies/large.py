"""Large batches of the study *strategies*, under a memory limit: what runs, the largest that does, and its error.

large-limit                choose the limit, unless it is given
large-KIND-BATCH           run it: data parallel, data parallel with gradient accumulation, pipeline
large-KIND-BATCH-on-8      the same on another number of workers (--large-workers)
largest-data               the largest batch of data parallel, found by running
large-train-KIND-BATCH-N   train with it and seed N (--large-epochs)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from stagewright.studies.framework.study import Part, PartContext
from stagewright.studies.parts.measurements import load_model_costs
from stagewright.studies.parts.samples import samples_folder
from stagewright.studies.parts.search import find_largest, largest_below
from stagewright.studies.strategies.measured import LARGE_KINDS, LARGE_NAMES, large_part, large_training_part
from stagewright.studies.strategies.options import Options


def large_parts(options: Options) -> Iterator[Part]:
    """List the parts of large batches."""
    if not options.large_batches:
        return
    task = options.tasks[0]
    profile = f"profile-{task}"
    yield Part(
        name="large-limit",
        about="choose the memory limit for large batches",
        run=partial(_limit, options),
        needs=(profile,),
    )
    cases = [
        (workers, batch, kind)
        for workers in options.large_workers
        for batch in options.large_batches
        for kind in LARGE_KINDS
        # Gradient accumulation needs as much memory for any batch: quick, the largest shows that.
        if kind != "accumulated" or not options.quick or batch == max(options.large_batches)
    ]
    for workers, batch, kind in cases:
        yield Part(
            name=large_part(kind, batch, workers),
            about=f"batch {batch} under the memory limit, {LARGE_NAMES[kind]}, {workers} workers",
            run=partial(_large, options, kind, batch, workers),
            needs=("large-limit", profile),
        )
    yield Part(
        name="largest-data",
        about="the largest batch under the memory limit, data, 2 workers",
        run=partial(_largest, options),
        needs=("large-limit", profile),
    )
    for workers, batch, kind in cases if options.large_epochs else ():
        for seed in options.seeds:
            yield Part(
                name=large_training_part(kind, batch, workers, seed),
                about=f"train {task} with batch {batch}, {LARGE_NAMES[kind]}, {workers} workers, seed {seed}",
                run=partial(_train_large, options, kind, batch, workers, seed),
                needs=("large-limit", profile, f"data-{task}", large_part(kind, batch, workers)),
            )


def _cuts(options: Options, saved: Mapping[str, Any], workers: int) -> tuple[str, ...]:
    """The cuts of a pipeline, by the time of micro-batches."""
    from stagewright.partition.conditions import Conditions
    from stagewright.partition.split import split
    from stagewright.planner.costs.interpolation import interpolate_at

    if workers == 2:
        return tuple(saved["large_cuts"])
    models = [load_model_costs(costs) for costs in saved["measured"]]
    return split(interpolate_at(models, options.piece).profile, workers, "time", Conditions()).cut_names


def _needed_bytes(options: Options, saved: Mapping[str, Any], kind: str, batch: int, workers: int = 2) -> int:
    """Forecast the memory of a large batch on its largest worker."""
    from stagewright.planner.costs.interpolation import interpolate_at
    from stagewright.planner.costs.measure import plan_microbatch_sizes
    from stagewright.planner.fit import peak_bytes

    models = [load_model_costs(costs) for costs in saved["measured"]]
    plan = options.large_plan(kind, batch, _cuts(options, saved, workers), workers)
    return peak_bytes(plan, interpolate_at(models, max(plan_microbatch_sizes(plan))))


def _limit(options: Options, context: PartContext) -> dict[str, Any]:
    """Forecast the memory of each large batch, and choose the limit."""
    saved = context.results[f"profile-{options.tasks[0]}"]
    needs = {
        str(workers): {
            kind: {str(batch): _needed_bytes(options, saved, kind, batch, workers) for batch in options.large_batches}
            for kind in LARGE_KINDS
        }
        for workers in {2, *options.large_workers}
    }
    ordered = sorted(needs["2"]["data"].values())
    limit = options.memory_bytes
    if limit is None:
        limit = round(math.sqrt(ordered[-1] * ordered[-2])) if len(ordered) > 1 else ordered[0] // 2
    return {
        "memory_bytes": limit,
        "is_chosen": options.memory_bytes is None,
        "needs": needs["2"],
        "needs_by_workers": needs,
    }


def _large(options: Options, kind: str, batch: int, workers: int, context: PartContext) -> dict[str, Any]:
    """Run a large batch under the memory limit."""
    saved = context.results[f"profile-{options.tasks[0]}"]
    plan = options.large_plan(kind, batch, _cuts(options, saved, workers), workers)
    limit = context.results["large-limit"]["memory_bytes"]
    about = {"batch": batch, "microbatches": plan.microbatches, "shared": not options.is_run(workers)}
    row = context.run_or_out_of_memory(replace(plan, memory_bytes=limit), for_speed=not options.quick)
    fields = ("ran", "samples_per_s", "equal", "peak_memory_bytes", "run") if row["ran"] else ("ran", "text")
    return {**about, **{name: row[name] for name in fields}}


def _largest(options: Options, context: PartContext) -> dict[str, Any]:
    """Find the largest batch of data parallel: it ran, and one step more did not."""
    saved = context.results[f"profile-{options.tasks[0]}"]
    limit, step = context.results["large-limit"]["memory_bytes"], options.largest_step
    forecast = largest_below(lambda size: _needed_bytes(options, saved, "data", size * step), limit)

    def run(size: int) -> dict[str, Any]:
        batch = size * step
        context.note(f"batch {batch}")
        plan = replace(options.large_plan("data", batch, ()), memory_bytes=limit, steps=1, warmup=0)
        row = context.run_or_out_of_memory(plan)
        names = ("ran", "peak_memory_bytes", "run", "text")
        return {"batch": batch, **{name: row[name] for name in names if name in row}}

    largest, is_exact, attempts = find_largest(max(1, forecast), 1, run)
    return {
        "largest": largest * step,
        "step": step,
        "is_exact": is_exact,
        "forecast": forecast * step,
        "attempts": attempts,
    }


def _train_large(
    options: Options, kind: str, batch: int, workers: int, seed: int, context: PartContext
) -> dict[str, Any] | None:
    """Train with a large batch that ran under the limit; None: it did not."""
    from stagewright.studies.parts.training import train_by_pipeline

    if not context.results[large_part(kind, batch, workers)]["ran"]:
        return None
    task = options.tasks[0]
    saved = context.results[f"profile-{task}"]
    plan = options.large_plan(kind, batch, _cuts(options, saved, workers), workers)
    limit = context.results["large-limit"]["memory_bytes"]
    name = options.recipe(task).task
    plan = replace(plan, task=name, epochs=options.large_epochs, steps=1, warmup=0, seed=seed, memory_bytes=limit)
    data = samples_folder(options.data, name, context)
    return train_by_pipeline(plan, context.runs, data=data, note=context.note)
