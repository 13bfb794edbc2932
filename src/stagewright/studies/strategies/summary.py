"""The study *strategies* in four sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stagewright.quantity import format_bytes
from stagewright.studies.framework.phrases import joined, percent, spread, times
from stagewright.studies.framework.study import Results, Summary
from stagewright.studies.parts.measurements import is_busy, why_busy
from stagewright.studies.parts.shares import mean_shares_text
from stagewright.studies.strategies.large_tables import only_pipeline
from stagewright.studies.strategies.measured import (
    Experiments,
    MeasuredExperiment,
    case_name,
    faster_strategy,
    task_scale,
)


def summarize(results: Results, options: Mapping[str, Any], experiments: Experiments) -> Summary:
    pairs = list(_pairs(options, experiments))
    if not pairs:
        return Summary(
            measured="Nothing was measured.",
            ideal="With n workers at most n ×.",
            why="Unknown: nothing was measured.",
            advice="See which parts failed, and run the same command again.",
        )
    workers = joined(str(count) for count in options["workers"])
    return Summary(
        measured=" ".join((*(_speeds(*pair) for pair in pairs), *_accuracies(results, options, experiments))),
        ideal=f"{workers} × with {workers} workers, and the accuracy of data parallel: the gradients are the same.",
        why=" ".join(dict.fromkeys((*(_why(data, pipeline) for _, data, pipeline in pairs), *_shares(results, pairs)))),
        advice=_advice(results, options, pairs),
    )


def _pairs(
    options: Mapping[str, Any], experiments: Experiments
) -> Iterator[tuple[str, MeasuredExperiment, MeasuredExperiment]]:
    """(data set, data parallel, the fastest pipeline of equal stages) of each task and number of workers."""
    for task, measured in experiments.items():
        for count in options["workers"]:
            rows = [row for row in measured if row.experiment.workers == count and row.speedup is not None]
            data = next((row for row in rows if row.experiment.strategy == "data"), None)
            pipelines = [row for row in rows if row.experiment.strategy == "pipeline"]
            even = [row for row in pipelines if row.experiment.cut == "even"] or pipelines
            if data is not None and even:
                yield case_name(options, task), data, max(even, key=lambda row: row.speedup or 0.0)


def _speeds(name: str, data: MeasuredExperiment, pipeline: MeasuredExperiment) -> str:
    source = "" if data.is_measured and pipeline.is_measured else ", forecast"
    texts = [
        f"{label} {times(row.speedup or 0.0)}" + (f" ({spread(row.speedups)})" if len(row.speedups) > 1 else "")
        for label, row in (
            ("data parallel", data),
            (f"pipeline ({pipeline.experiment.microbatches} micro-batches)", pipeline),
        )
    ]
    return f"{name} on {data.experiment.workers} workers{source}: {joined(texts)} over one device."


def _accuracies(results: Results, options: Mapping[str, Any], experiments: Experiments) -> Iterator[str]:
    for task, measured in experiments.items():
        scale = task_scale(results, options, task, measured)
        data = next((row for row in measured if row.experiment.strategy == "data" and row.mean is not None), None)
        rows = [row for row in measured if row.experiment.strategy == "pipeline" and row.mean is not None]
        if data is None or data.mean is None or not rows:
            continue
        if not scale.has_learned(data) or scale.deviation is None:
            yield f"The comparison of accuracies is inconclusive ({scale.shown(data)}, guessing {scale.chance:g})."
            continue
        differences = [(row, scale.difference(row, data)) for row in rows]
        different = [
            f"{row.experiment.shown} {difference.shown}" for row, difference in differences if difference.is_significant
        ]
        widest = max((one for _, one in differences), key=lambda one: abs(one.points) + one.half_width)
        yield (
            f"Accuracy: data {scale.shown(data)}; beyond the interval of the difference: {joined(different)}."
            if different
            else f"Accuracy: data {scale.shown(data)}; no pipeline differs significantly (at most {widest.shown})."
        )


def _why(data: MeasuredExperiment, pipeline: MeasuredExperiment) -> str:
    stages, microbatches = pipeline.experiment.workers, pipeline.experiment.microbatches
    bubble = (stages - 1) / (microbatches + stages - 1)
    return (
        f"With {stages} equal stages and {microbatches} micro-batches the pipeline bubble, (p − 1) ÷ (m + p − 1), is "
        f"{percent(bubble)} of a step; data parallel has none, but all-reduces every gradient."
    )


_MORE_COMPUTE = 1.1
"""Compute time of all workers, relative to one device, from which it is worth a sentence."""


def _shares(results: Results, pairs: Sequence[tuple[str, MeasuredExperiment, MeasuredExperiment]]) -> Iterator[str]:
    """Where the time of a step went, of every measured pair."""
    busy = ", on a busy machine" if is_busy(results) else ""
    for name, data, pipeline in pairs:
        if data.shares and pipeline.shares:
            yield (
                f"Time of a step ({name}, mean of {data.experiment.workers} workers{busy}): data parallel "
                f"{mean_shares_text(data.shares)}; pipeline {mean_shares_text(pipeline.shares)}."
            )
            ratios = (data.compute_ratio or 0.0, pipeline.compute_ratio or 0.0)
            if min(ratios) > 0 and max(ratios) > _MORE_COMPUTE:
                yield (
                    f"All workers together compute {times(ratios[0])} (data parallel) and {times(ratios[1])} "
                    "(pipeline) as long as one device for the same batch: smaller batches use a device less well, and "
                    "cores of one machine slow each other down."
                )


def _advice(
    results: Results, options: Mapping[str, Any], pairs: Sequence[tuple[str, MeasuredExperiment, MeasuredExperiment]]
) -> str:
    faster = {faster_strategy(data, pipeline) for _, data, pipeline in pairs}
    text = {
        frozenset({"data"}): "Use data parallel where the model and its batch fit on every device",
        frozenset({"pipeline"}): "Use the pipeline: it is faster here",
        frozenset({""}): "Use either: their speeds differ by no more than those of repeated runs",
    }.get(frozenset(faster), "Neither is faster in all cases: compare both for your batch and workers")
    rates = [max(data.speedup or 0.0, pipeline.speedup or 0.0) for _, data, pipeline in pairs]
    if max(rates) <= 1 + pairs[0][1].margin:
        text = (
            f"Whether either is faster than one device is uncertain: {busy}"
            if (busy := why_busy(results))
            else "Use one device: neither strategy is measurably faster with this model and batch, since the steps are "
            "too short for what a split and its messages cost"
        )
    limit = results.get("large-limit")
    batches = only_pipeline(results, options)
    if limit is not None and batches:
        text += (
            f"; where the batch does not fit (batch {joined(map(str, batches))} in "
            f"{format_bytes(limit['memory_bytes'])} per device), use a pipeline or gradient accumulation"
        )
    return f"{text}."
