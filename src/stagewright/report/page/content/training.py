"""The section on training: loss over steps, the metric over epochs, and the last epoch as a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from stagewright.report.page.content.runs import RunData
from stagewright.report.page.sections import Line, LineChart, Section
from stagewright.runs.result import EpochResult
from stagewright.table import Table, number_columns, text_columns

_MAX_POINTS = 400


def training_section(runs: Sequence[RunData]) -> Section | None:
    """Show curves of training runs; runs that repeat one batch have none."""
    trained = [run for run in runs if run.is_trained and _steps(run)]
    if not trained:
        return None
    items: list[LineChart | Table] = [
        LineChart(
            name="loss",
            title="Training loss",
            x_title="step",
            x_quantity="count",
            y_title="loss",
            lines=tuple(
                _loss_line(run, paint, dashed) for run, (paint, dashed) in zip(trained, _paints(trained), strict=True)
            ),
            note=f"Neighboring steps are averaged so that a curve has at most {_MAX_POINTS} points.",
        )
    ]
    evaluated: dict[str, list[RunData]] = {}
    for run in trained:
        if run.result.history is not None and run.result.history.epochs:
            evaluated.setdefault(run.result.history.metric, []).append(run)
    for metric, runs_of_metric in evaluated.items():
        if max(len(_epochs(run)) for run in runs_of_metric) > 1:
            items.append(_metric_chart(metric, runs_of_metric))
        items.append(_metric_table(metric, runs_of_metric))
    prose = () if evaluated else ("No epoch has ended yet, so there is no evaluation.",)
    return Section(name="training", title="Training curves", prose=prose, items=tuple(items))


def _steps(run: RunData) -> list[dict[str, Any]]:
    return [line for line in run.metrics if line.get("kind") == "step" and _is_number(line, "step", "loss")]


def _is_number(line: dict[str, Any], *names: str) -> bool:
    """Whether a line of metrics has finite numbers under these names."""
    return all(
        isinstance(line.get(name), int | float) and not isinstance(line[name], bool) and abs(line[name]) < 1e300
        for name in names
    )


def _epochs(run: RunData) -> tuple[EpochResult, ...]:
    return () if run.result.history is None else run.result.history.epochs


def _loss_line(run: RunData, paint: str, dashed: bool) -> Line:
    steps = _steps(run)
    size = -(-len(steps) // _MAX_POINTS)
    groups = [steps[index : index + size] for index in range(0, len(steps), size)]
    return Line(
        name=run.label,
        paint=paint,
        dashed=dashed,
        x=tuple(float(group[-1]["step"]) for group in groups),
        y=tuple(statistics.fmean(float(step["loss"]) for step in group) for group in groups),
    )


def _metric_chart(metric: str, runs: Sequence[RunData]) -> LineChart:
    lines = tuple(
        Line(
            name=run.label,
            paint=paint,
            dashed=dashed,
            x=tuple(float(epoch.epoch) for epoch in _epochs(run)),
            y=tuple(epoch.score for epoch in _epochs(run)),
        )
        for run, (paint, dashed) in zip(runs, _paints(runs), strict=True)
    )
    return LineChart(
        name=metric,
        title=f"{metric.capitalize()} on the evaluation split",
        x_title="epoch",
        x_quantity="count",
        y_title=metric,
        y_quantity="share" if metric == "accuracy" else "number",
        lines=lines,
        from_zero=False,
    )


def _metric_table(metric: str, runs: Sequence[RunData]) -> Table:
    rows = []
    for run in runs:
        last = _epochs(run)[-1]
        rows.append(
            (
                run.label,
                str(last.epoch),
                f"{last.training_loss:.4f}",
                f"{last.evaluation_loss:.4f}",
                f"{last.score:.4f}",
                f"{run.result.samples_per_s:.1f}",
            )
        )
    return Table(
        title="After the last epoch",
        columns=(
            *text_columns("run"),
            *number_columns("epoch", "training loss", "evaluation loss", metric, "samples/s"),
        ),
        rows=tuple(rows),
        notes=_seed_notes(metric, runs),
    )


def _seed_notes(metric: str, runs: Sequence[RunData]) -> tuple[str, ...]:
    """Return mean and standard deviation where the runs differ only in their seeds."""
    scores = [_epochs(run)[-1].score for run in runs]
    num_kinds = len({(str(run.plan.mesh), run.plan.model.name, run.plan.batch) for run in runs})
    if len(scores) < 2 or num_kinds > 1 or len({run.plan.seed for run in runs}) != len(runs):
        return ()
    return (f"{metric} {statistics.fmean(scores):.4f} ± {statistics.stdev(scores):.4f} over {len(scores)} seeds",)


def _paints(runs: Sequence[RunData]) -> list[tuple[str, bool]]:
    """Give each run the color of its strategy, or another if taken; alternate runs are dashed, so that none hides."""
    taken: set[str] = set()
    paints = []
    for index, run in enumerate(runs):
        paints.append((run.paint if run.paint not in taken else f"stage-{index % 8}", index % 2 == 1))
        taken.add(run.paint)
    return paints
