"""Tables and figures of the study *strategies*."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stagewright.quantity import format_bytes
from stagewright.studies.framework.phrases import counted
from stagewright.studies.framework.study import Figure, Results
from stagewright.studies.framework.tables import study_table
from stagewright.studies.parts.measurements import calibration_note
from stagewright.studies.parts.training_recipe import TrainingRecipe
from stagewright.studies.strategies.large_tables import large_table
from stagewright.studies.strategies.measured import (
    PUBLISHED,
    Experiments,
    MeasuredExperiment,
    PlainLoop,
    case_name,
    forecast_check,
    plain_loop,
    task_scale,
)
from stagewright.table import Table


def tables(results: Results, options: Mapping[str, Any], experiments: Experiments) -> tuple[Table, ...]:
    """The experiments, the published ones, and large batches."""
    shown = [_experiment_table(results, options, experiments)]
    data_sets = {options["recipes"][task].shown_data for task in experiments}
    published = tuple(row for row in PUBLISHED if row[1] in data_sets)
    if published:
        columns = ("experiment", "data set", "backbone", "GPUs", "batch (micro-batches)", "learning rate", "accuracy %")
        shown.append(
            study_table(
                "Published",
                (*columns, "samples/s", "speed-up over data on 2"),
                published,
                "By others, on GPUs, with whole data sets and larger text models. Compare ratios.",
            )
        )
    if options["large_batches"]:
        shown.append(large_table(results, options))
    return tuple(shown)


def figures(options: Mapping[str, Any], experiments: Experiments) -> tuple[Figure, ...]:
    """Speed-up and accuracy of every experiment, one panel per task."""
    if not any(experiments.values()):
        return ()
    is_forecast = any(row.speedups and not row.is_measured for rows in experiments.values() for row in rows)
    hatched = " (hatched: forecast)" if is_forecast else ""
    return (
        Figure(
            name="strategies",
            caption=f"Speed-up over one device of every experiment{hatched}, and its accuracy over seeds.",
            draw=partial(_draw, dict(experiments), options),
        ),
    )


def data_on_2(measured: Sequence[MeasuredExperiment]) -> MeasuredExperiment | None:
    """Data parallel on 2 workers, to which published speed-ups refer."""
    return next((row for row in measured if row.experiment.name == "data-2" and row.samples_per_s), None)


def _source(row: MeasuredExperiment, verdict: str) -> str:
    if row.is_measured:
        return "measured" if row.equal else "parity check failed"
    if row.forecast is None:
        return "–"
    return {"trusted": "forecast", "unchecked": "unverified forecast"}.get(verdict, f"forecast, {verdict}")


def _over(rate: float | None, reference: MeasuredExperiment | None) -> str:
    """Write a throughput relative to data parallel on 2 workers."""
    is_known = rate and reference is not None and reference.samples_per_s
    return f"{(rate or 0.0) / (reference.samples_per_s or 1.0):.2f}" if is_known and reference is not None else "–"


def _single_device_rows(
    recipe: TrainingRecipe, loop: PlainLoop | None, chance: str, reference: MeasuredExperiment | None
) -> list[tuple[str, ...]]:
    """The plain torch loop and the baseline, which are not trained."""
    if loop is None:
        return []
    ratio = f"{statistics.median(loop.ratios):.2f}" if loop.ratios else "–"
    rates = [("plain torch loop", loop.samples_per_s, ratio), ("one device (baseline)", loop.baseline, "1.00")]
    about = (recipe.shown_data, recipe.model, "1", str(recipe.batch), f"{recipe.learning_rate:g}", "–", "–", chance)
    return [
        (name, *about, f"{rate:.1f}", speedup, _over(rate, reference), "–", "–", "measured")
        for name, rate, speedup in rates
        if rate is not None
    ]


def _experiment_table(results: Results, options: Mapping[str, Any], experiments: Experiments) -> Table:
    rows, sentences = [], []
    for task, measured in experiments.items():
        recipe: TrainingRecipe = options["recipes"][task]
        reference, check = data_on_2(experiments[recipe.task]), forecast_check(results, measured)
        scale = task_scale(results, options, task, measured)
        if any(not row.is_measured and row.forecast is not None for row in measured):
            sentences.append(f"{case_name(options, task)}: {check.sentence}")
        rows += _single_device_rows(recipe, plain_loop(results, options, task), f"{scale.chance:g}", reference)
        for row in measured:
            over_data = _over(row.samples_per_s, reference) if row.equal else "–"
            rows.append(
                (
                    row.experiment.shown,
                    recipe.shown_data,
                    recipe.model,
                    str(row.experiment.workers),
                    row.shown_batch,
                    f"{row.learning_rate:g}",
                    row.shown,
                    f"± {scale.half_width(row):.1f}" if row.mean is not None else "–",
                    f"{scale.chance:g}",
                    f"{row.samples_per_s:.1f}" if row.samples_per_s is not None else "–",
                    f"{row.speedup:.2f}" if row.speedup is not None else "–",
                    over_data,
                    f"{row.forecast:.2f}" if row.forecast is not None else "–",
                    ", ".join(format_bytes(size) for size in row.peak_bytes) or "–",
                    _source(row, check.verdict),
                )
            )
    metric = ", for CoLA Matthews × 100" if "cola" in experiments else ""
    columns = ("experiment", "data set", "backbone", "workers", "batch (micro-batches)", "learning rate", "accuracy %")
    speed = ("samples/s", "speed-up", "over data on 2", "forecast", "memory of each worker", "source of speed")
    return study_table(
        "Pipeline and data parallel",
        (*columns, "95 %", "guessing", *speed),
        rows,
        f"Accuracy: mean ± standard deviation over {counted(len(options['seeds']), 'seed')}{metric}, always from real "
        "training; 95 %: half of the interval of the mean, from the evaluated samples and the variation between seeds; "
        "guessing: always the most frequent class. Workers that share a device compute the same. Speed-up: over one "
        "device with the same batch, median over rounds of the ratio within a round; every plan first passed its "
        "parity check. Forecast: the speed-up from the profile, made before any run; where there are fewer devices "
        "than workers, it replaces the measured speed, as if each worker had its own device. Plain torch loop: the "
        "same model, batch and optimizer without Stagewright, on one device. Over data on 2: samples/s relative to "
        f"data parallel on 2 workers, as published. {' '.join(sentences)}"
        f"{calibration_note(results)}".rstrip(),
    )


def _draw(experiments: Experiments, options: Mapping[str, Any], path: Path) -> None:
    from stagewright.report.figures.strategies import StrategyBar, draw_strategies

    panels = {
        f"{case_name(options, task)}, {options['recipes'][task].model}": [
            StrategyBar(
                label=f"{row.experiment.shown}, {row.experiment.workers} workers, {row.shown_batch}",
                strategy=row.experiment.strategy,
                speedup=row.speedup,
                is_measured=row.is_measured,
                accuracy=row.shown,
            )
            for row in measured
        ]
        for task, measured in experiments.items()
    }
    draw_strategies(panels, path, title="Pipeline and data parallel")
