"""What was learned: loss over steps, the metric over epochs, and the last epoch as a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from stagewright.report.page.content.runs import RunData
from stagewright.report.page.sections import Line, LineChart, Section, Table

__all__ = ["learning_section"]

_MOST_POINTS = 400  # of a curve: more can't be seen


def learning_section(runs: Sequence[RunData]) -> Section | None:
    """Curves of training runs; runs that only repeat one batch have none."""
    trained = [run for run in runs if run.is_trained and _steps(run)]
    if not trained:
        return None
    losses = tuple(_loss(run, paint, dashed) for run, (paint, dashed) in zip(trained, _paints(trained), strict=True))
    items: list[LineChart | Table] = [
        LineChart(
            name="loss",
            title="Training loss",
            x_title="step",
            x_quantity="count",
            y_title="loss",
            lines=losses,
            note=f"Means of as many steps as it takes to have {_MOST_POINTS} points at most.",
        )
    ]
    metrics = dict.fromkeys(str(run.result["metric"]) for run in trained if run.result.get("epochs"))
    for metric in metrics:
        judged = [run for run in trained if run.result.get("metric") == metric]
        if max(len(run.result["epochs"]) for run in judged) > 1:
            items.append(_metric_chart(metric, judged))
        items.append(_metric_table(metric, judged))
    reason = () if metrics else ("No epoch has ended yet, so there is no accuracy.",)
    return Section(name="learning", title="Learning", prose=reason, items=tuple(items))


def _steps(run: RunData) -> list[dict[str, Any]]:
    return [line for line in run.metrics if line.get("kind") == "step" and line.get("loss") is not None]


def _loss(run: RunData, paint: str, dashed: bool) -> Line:
    """Means over neighbours, so that there are few enough points."""
    steps = _steps(run)
    size = -(-len(steps) // _MOST_POINTS)
    groups = [steps[at : at + size] for at in range(0, len(steps), size)]
    return Line(
        name=run.label,
        paint=paint,
        dashed=dashed,
        x=tuple(float(group[-1]["step"]) for group in groups),
        y=tuple(statistics.fmean(float(one["loss"]) for one in group) for group in groups),
    )


def _metric_chart(metric: str, runs: Sequence[RunData]) -> LineChart:
    lines = tuple(
        Line(
            name=run.label,
            paint=paint,
            dashed=dashed,
            x=tuple(float(row["epoch"]) for row in run.result["epochs"]),
            y=tuple(float(row[metric]) for row in run.result["epochs"]),
        )
        for run, (paint, dashed) in zip(runs, _paints(runs), strict=True)
    )
    share = metric == "accuracy"
    return LineChart(
        name=metric,
        title=f"{metric.capitalize()} on the task's evaluation samples",
        x_title="epoch",
        x_quantity="count",
        y_title=metric,
        y_quantity="share" if share else "number",
        lines=lines,
        from_zero=False,
    )


def _metric_table(metric: str, runs: Sequence[RunData]) -> Table:
    rows = []
    for run in runs:
        last = run.result["epochs"][-1]
        rows.append(
            (
                run.label,
                str(last["epoch"]),
                f"{last['training_loss']:.4f}",
                f"{last['evaluation_loss']:.4f}",
                f"{last[metric]:.4f}",
                f"{run.result['samples_per_s']:.1f}",
            )
        )
    return Table(
        title="After the last epoch",
        head=("run", "epoch", "training loss", "evaluation loss", metric, "samples/s"),
        rows=tuple(rows),
        right=frozenset(range(1, 6)),
        note=_over_seeds(metric, runs),
    )


def _over_seeds(metric: str, runs: Sequence[RunData]) -> str:
    """Mean and spread where runs differ in nothing but their seeds."""
    found = [float(run.result["epochs"][-1][metric]) for run in runs]
    alike = len({(str(run.plan.mesh), run.plan.model.name, run.plan.batch) for run in runs}) == 1
    if len(found) < 2 or not alike or len({run.plan.seed for run in runs}) != len(runs):
        return ""
    return f"{metric} {statistics.fmean(found):.4f} ± {statistics.stdev(found):.4f} over {len(found)} seeds"


def _paints(runs: Sequence[RunData]) -> list[tuple[str, bool]]:
    """A run's strategy's colour, and a stage's where that is taken; every second one dashed, so that none is hidden."""
    taken: set[str] = set()
    found = []
    for at, run in enumerate(runs):
        paint = run.paint if run.paint not in taken else f"stage-{at % 8}"
        taken.add(run.paint)
        found.append((paint, at % 2 == 1))
    return found
