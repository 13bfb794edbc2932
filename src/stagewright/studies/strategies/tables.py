"""The tables and figures of the study *strategies*. Pure but for the drawing itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stagewright.quantity import format_bytes
from stagewright.studies.parts.training_recipe import Lesson
from stagewright.studies.framework.study import Drawing, Results, Table
from stagewright.studies.strategies.measured import LARGE_KINDS, PUBLISHED, PUBLISHED_LARGE, MeasuredWay

__all__ = ["baseline", "drawings", "large_rows", "tables"]

Ways = Mapping[str, Sequence[MeasuredWay]]


def tables(results: Results, options: Mapping[str, Any], ways: Ways) -> tuple[Table, ...]:
    """Experiments as published, the published ones, and large batches."""
    found = [_experiments(options, ways)]
    named = {options["lessons"][task].shown_data for task in ways}
    published = tuple(row for row in PUBLISHED if row[1] in named)
    if published:
        columns = ("experiment", "data set", "backbone", "GPUs", "batch (micro-batches)", "learning rate", "accuracy %")
        found.append(
            Table(
                title="Published",
                columns=(*columns, "samples/s", "speed-up over data on 2"),
                rows=published,
                note="By others, on GPUs, with whole data sets and larger text models. Compare ratios.",
            )
        )
    if options["large_batches"]:
        found.append(_large(results, options))
    return tuple(found)


def drawings(options: Mapping[str, Any], ways: Ways) -> tuple[Drawing, ...]:
    """Speed-up and accuracy of every experiment, one panel a task."""
    if not any(ways.values()):
        return ()
    return (
        Drawing(
            name="strategies",
            caption="Speed-up over serial of every experiment (hatched: forecast), and its accuracy over seeds.",
            draw=partial(_draw, dict(ways), dict(options["lessons"])),
        ),
    )


def baseline(every: Sequence[MeasuredWay]) -> MeasuredWay | None:
    """Data parallel on 2 workers, over which the published speed-ups are."""
    return next((one for one in every if one.way.name == "data-2" and one.samples_per_s), None)


def _origin(one: MeasuredWay) -> str:
    if one.is_measured:
        return "measured" if one.equal else "not equal to serial"
    return "–" if one.samples_per_s is None else "forecast"


def _experiments(options: Mapping[str, Any], ways: Ways) -> Table:
    rows = []
    for task, every in ways.items():
        lesson: Lesson = options["lessons"][task]
        first = baseline(every)
        for one in every:
            over = (
                f"{one.samples_per_s / first.samples_per_s:.2f}"
                if first is not None and first.samples_per_s and one.samples_per_s and one.equal
                else "–"
            )
            rows.append(
                (
                    one.way.shown,
                    lesson.shown_data,
                    lesson.model,
                    str(one.way.workers),
                    one.shown_batch,
                    f"{one.learning_rate:g}",
                    one.shown_accuracy,
                    f"{one.samples_per_s:.1f}" if one.samples_per_s is not None else "–",
                    f"{one.speedup:.2f}" if one.speedup is not None else "–",
                    over,
                    f"{one.forecast:.2f}" if one.forecast is not None else "–",
                    _origin(one),
                )
            )
    metric = ", for CoLA Matthews × 100" if "cola" in ways else ""
    return Table(
        title="Pipeline against data parallel",
        columns=(
            "experiment",
            "data set",
            "backbone",
            "workers",
            "batch (micro-batches)",
            "learning rate",
            "accuracy %",
            "samples/s",
            "speed-up",
            "over data on 2",
            "forecast",
            "speed is",
        ),
        rows=tuple(rows),
        note=f"Accuracy: mean ± deviation over {len(options['seeds'])} seeds{metric}, always of a real training; "
        "workers that share a device compute the same. Speed-up: over serial with the same batch, median over rounds "
        "of the ratio within a round; every plan was first proven equal to serial. Forecast: the speed-up from the "
        "profile, made before anything ran; where there are fewer devices than workers it stands for the speed, as if "
        "each had its own.",
    )


def large_rows(results: Mapping[str, Any], options: Mapping[str, Any]) -> list[tuple[str, int, Mapping[str, Any]]]:
    """(kind, batch, what came of it) of every large batch that was tried."""
    return [
        (kind, batch, row)
        for kind in LARGE_KINDS
        for batch in options["large_batches"]
        if (row := results.get(f"large-{kind}-{batch}")) is not None
    ]


def _large(results: Results, options: Mapping[str, Any]) -> Table:
    limit = results.get("large-limit")
    tried = large_rows(results, options)
    first = next((row["samples_per_s"] for kind, _, row in tried if kind == "data" and row["ran"]), None)
    rows = []
    for kind, batch, row in tried:
        needs = "–" if limit is None else format_bytes(limit["needs"][kind][str(batch)])
        name = {"data": "data", "accumulated": "data, in pieces", "pipeline": "pipeline"}[kind]
        good = row["ran"] and row["equal"]
        rows.append(
            (
                name,
                str(batch),
                str(row["microbatches"]),
                "ran" if good else "not equal to serial" if row["ran"] else "out of memory",
                format_bytes(max(row["peak_memory_bytes"])) if row["ran"] else "–",
                needs,
                f"{row['samples_per_s']:.1f}" if good else "–",
                f"{row['samples_per_s'] / first:.2f}" if good and first else "–",
            )
        )
    lesson: Lesson = options["lessons"][options["tasks"][0]]
    held = format_bytes(limit["memory_bytes"]) if limit is not None else "a limit that is not known"
    how = " (between what data parallel needs for the two largest)" if limit is not None and limit["is_chosen"] else ""
    return Table(
        title=f"Large batches of {lesson.model} on two devices of {held}",
        columns=("experiment", "batch", "pieces", "came of it", "peak", "forecast", "samples/s", "speed-up"),
        rows=tuple(rows),
        note=f"The limit is {held} a device{how}; a worker that needs more ends the run. Pieces have "
        f"{options['piece']} samples. Speed-up: over data parallel with the smallest batch. {PUBLISHED_LARGE}",
    )


def _draw(ways: Ways, lessons: Mapping[str, Lesson], path: Path) -> None:
    from stagewright.report.figures.strategies import StrategyBar, draw_strategies

    panels = {
        f"{lessons[task].shown_data}, {lessons[task].model}": [
            StrategyBar(
                label=f"{one.way.shown}, {one.way.workers} workers, {one.shown_batch}",
                strategy=one.way.strategy,
                speedup=one.speedup,
                is_measured=one.is_measured,
                accuracy=one.shown_accuracy,
            )
            for one in every
        ]
        for task, every in ways.items()
    }
    draw_strategies(panels, path, title="Pipeline against data parallel")
