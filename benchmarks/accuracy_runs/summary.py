"""Means over seeds of the trainings of a record, with 95 % intervals and verdicts, as the studies compute them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from accuracy_runs.cases import CODECS, RECIPES
from stagewright.studies.codecs.measured import goal_points
from stagewright.studies.framework.accuracy import accuracy_scale
from stagewright.studies.framework.rounds import SeedValue, SeedValues

Row = dict[str, Any]


def summarize(rows: Sequence[Row]) -> list[Row]:
    """Return one entry for each task, strategy, number of workers and codec."""
    final = [row for row in rows if not row["is_search"] and row.get("score") is not None]
    return [entry for task in RECIPES for entry in _of_task(task, [row for row in final if row["task"] == task])]


def _of_task(task: str, rows: Sequence[Row]) -> Iterator[Row]:
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["strategy"], row["workers"], row["codec"]), []).append(row)
    values = {
        key: SeedValues(trained=tuple(SeedValue(seed=row["seed"], value=row["score"]) for row in group))
        for key, group in groups.items()
    }
    num_evaluated = max((row["num_evaluated"] for row in rows), default=None)
    samples = RECIPES[task].samples
    scale = accuracy_scale(samples, RECIPES[task].metric, values.values(), num_evaluated)
    for key in sorted(groups, key=_order):
        strategy, workers, codec = key
        group, reference = groups[key], values.get((strategy, workers, "none"))
        has_verdict = reference is not None and codec != "none" and scale.has_learned(reference)
        yield {
            "task": task,
            "metric": RECIPES[task].metric,
            "strategy": strategy,
            "workers": workers,
            "codec": codec,
            "ratio": group[0]["ratio"],
            "seeds": sorted(row["seed"] for row in group),
            "mean": values[key].mean,
            "half_width": scale.half_width(values[key]),
            "accuracy": statistics.fmean(row["accuracy"] for row in group),
            "chance": scale.chance,
            "has_learned": scale.has_learned(values[key]),
            "verdict": scale.compare(values[key], reference, goal_points(samples)) if has_verdict else None,
            "num_train": group[0]["num_train"],
            "num_evaluated": group[0]["num_evaluated"],
            "batch": group[0]["batch"],
            "steps": group[0]["steps"],
            "learning_rate": group[0]["learning_rate"],
            "training_loss": statistics.fmean(row["training_loss"] for row in group),
            "samples_per_s": statistics.median(row["steps"] * row["batch"] / row["training_s"] for row in group),
        }


def _order(key: tuple[str, int, str]) -> tuple[int, bool, int]:
    strategy, workers, codec = key
    return workers, strategy == "data", CODECS.index(codec) if codec in CODECS else len(CODECS)


def lines(summary: Sequence[Row]) -> Iterator[str]:
    """Write a summary as lines of text."""
    for row in summary:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        yield (
            f"{row['task']:8} {row['strategy']}={row['workers']}  {row['codec']:10} {ratio:6} {len(row['seeds'])} seeds"
            f" {row['mean']:6.2f} ± {row['half_width']:.2f} (chance {row['chance']:g})  {row['verdict'] or ''}"
        )
