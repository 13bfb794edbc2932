"""The table and the answer about large batches in the study *strategies*. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from stagewright.quantity import format_bytes
from stagewright.studies.framework.phrases import joined, study_command
from stagewright.studies.framework.rounds import SeedValues, read_trained
from stagewright.studies.framework.study import Results
from stagewright.studies.framework.tables import study_table
from stagewright.studies.parts.training_recipe import TrainingRecipe
from stagewright.studies.strategies.measured import (
    LARGE_KINDS,
    LARGE_NAMES,
    PUBLISHED_LARGE,
    large_part,
    large_training_part,
)
from stagewright.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeRun:
    """A large batch that was run."""

    kind: str
    batch: int
    workers: int
    row: Mapping[str, Any]
    errors: SeedValues
    """Error in % after training, of each seed."""

    @property
    def passed(self) -> bool:
        """Whether it ran, and passed its parity check."""
        return bool(self.row["ran"] and self.row["equal"])

    @property
    def rate(self) -> float | None:
        """Samples/s; None: it did not run, or its workers shared devices."""
        return float(self.row["samples_per_s"]) if self.passed and not self.row.get("shared") else None


def large_runs(results: Mapping[str, Any], options: Mapping[str, Any]) -> list[LargeRun]:
    """List every large batch that was run."""
    return [
        LargeRun(
            kind=kind, batch=batch, workers=workers, row=row, errors=_errors(results, options, kind, batch, workers)
        )
        for workers in _workers(options)
        for kind in LARGE_KINDS
        for batch in options["large_batches"]
        if (row := results.get(large_part(kind, batch, workers))) is not None
    ]


def _workers(options: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(options.get("large_workers") or (2,))


def _errors(results: Mapping[str, Any], options: Mapping[str, Any], kind: str, batch: int, workers: int) -> SeedValues:
    trained = read_trained(results, options["seeds"], partial(large_training_part, kind, batch, workers))
    return SeedValues(trained=tuple(replace(one, value=100 - one.value) for one in trained))


def only_pipeline(results: Mapping[str, Any], options: Mapping[str, Any], workers: int = 2) -> list[int]:
    """Return the large batches that ran out of memory under data parallel and ran as a pipeline."""
    passed = {(run.kind, run.batch): run.passed for run in large_runs(results, options) if run.workers == workers}
    return [
        batch
        for batch in options["large_batches"]
        if passed.get(("data", batch)) is False and passed.get(("pipeline", batch))
    ]


def large_table(results: Results, options: Mapping[str, Any]) -> Table:
    """What ran under the memory limit, and how fast."""
    limit = results.get("large-limit")
    runs = large_runs(results, options)
    reference = next((run.rate for run in runs if run.kind == "data" and run.rate), None)
    is_trained = any(run.errors.values for run in runs)
    has_speed = not options.get("quick")  # whose runs are not repeated where their speed is not plausible
    rows = [
        (
            LARGE_NAMES[run.kind],
            str(run.workers),
            str(run.batch),
            str(run.row["microbatches"]),
            "ran" if run.passed else "parity check failed" if run.row["ran"] else "out of memory",
            format_bytes(max(run.row["peak_memory_bytes"])) if run.row["ran"] else "–",
            _forecast_bytes(limit, run),
            *((_rate(run), _speedup(run, reference)) if has_speed else ()),
            *((run.errors.shown,) if is_trained else ()),
        )
        for run in runs
    ]
    recipe: TrainingRecipe = options["recipes"][options["tasks"][0]]
    memory = format_bytes(limit["memory_bytes"]) if limit is not None else "an unknown size"
    is_chosen = limit is not None and limit["is_chosen"]
    choice = " (between what data parallel needs for the two largest batches)" if is_chosen else ""
    columns = ("experiment", "workers", "batch", "micro-batches", "result", "peak memory", "forecast")
    speed = (
        "Speed-up: over data parallel with the smallest batch. "
        if has_speed
        else "Their speeds are not compared with --quick. "
    )
    error = "Error: 100 − accuracy, mean ± standard deviation over seeds. " if is_trained else ""
    shared = "Workers that share a device have no speed. " if any(run.row.get("shared") for run in runs) else ""
    return study_table(
        f"Large batches of {recipe.model} on devices of {memory}",
        (*columns, *(("samples/s", "speed-up") if has_speed else ()), *(("error %",) if is_trained else ())),
        rows,
        f"Memory limit: {memory} per worker{choice}; a worker that exceeds it ends the run. Micro-batches have "
        f"{options['piece']} samples. {speed}{error}{shared}"
        f"{PUBLISHED_LARGE}",
    )


def _rate(run: LargeRun) -> str:
    return f"{run.rate:.1f}" if run.rate else "–"


def _speedup(run: LargeRun, reference: float | None) -> str:
    return f"{run.rate / reference:.2f}" if run.rate and reference else "–"


def _forecast_bytes(limit: Mapping[str, Any] | None, run: LargeRun) -> str:
    if limit is None:
        return "–"
    needs = (limit.get("needs_by_workers") or {"2": limit["needs"]}).get(str(run.workers))
    return "–" if needs is None else format_bytes(needs[run.kind][str(run.batch)])


def large_answer(results: Results, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Which batches run out of memory under data parallel but run as a pipeline."""
    runs = large_runs(results, options)
    limit = results.get("large-limit")
    if not runs or limit is None:
        command = study_command(options, "strategies --large-batches 256,1024,4096")
        return (
            (f"Large batches were not studied; this studies them: {command}",) if not options["large_batches"] else ()
        )
    memory = format_bytes(limit["memory_bytes"])
    sentences = [text for workers in _workers(options) for text in _on_workers(results, options, workers, memory)]
    largest = results.get("largest-data")
    if largest is not None:
        sentences.append(_largest_text(largest, memory))
    if not any(run.errors.values for run in runs):
        command = study_command(options, "strategies --large-epochs 3")
        sentences.append(f"Their error after training was not studied; this does: {command}")
    return (*sentences, PUBLISHED_LARGE)


def _on_workers(results: Results, options: Mapping[str, Any], workers: int, memory: str) -> Iterator[str]:
    recipe: TrainingRecipe = options["recipes"][options["tasks"][0]]
    runs = [run for run in large_runs(results, options) if run.workers == workers]
    by_pipeline = only_pipeline(results, options, workers)
    head = f"{recipe.model} on {'two' if workers == 2 else workers} devices of {memory}"
    yield (
        f"{head}: batch {joined(str(batch) for batch in by_pipeline)} runs out of memory under data parallel and "
        "runs as a pipeline."
        if by_pipeline
        else f"{head}: no tested batch runs only as a pipeline."
    )
    for kind, name in (("data", "Data parallel"), ("pipeline", "Pipeline")):
        texts = [f"{run.batch} {_outcome(run)}" for run in runs if run.kind == kind]
        if texts:
            yield f"{name}, batch and peak memory: {joined(texts)}."
    accumulated = [
        str(run.batch) for run in runs if run.kind == "accumulated" and run.batch in by_pipeline and run.passed
    ]
    if accumulated:
        yield (
            f"Data parallel with gradient accumulation over micro-batches of {options['piece']} samples runs "
            f"{joined(accumulated)} too: the micro-batches save the memory."
        )


def _outcome(run: LargeRun) -> str:
    if not run.row["ran"]:
        return "out of memory"
    error = f", error {run.errors.shown} %" if run.errors.values else ""
    return f"({format_bytes(max(run.row['peak_memory_bytes']))}{error})"


def _largest_text(largest: Mapping[str, Any], memory: str) -> str:
    """Write the largest batch of data parallel, and how it is known."""
    failed = [attempt["batch"] for attempt in largest["attempts"] if not attempt["ran"]]
    if not largest["largest"]:
        return f"Data parallel on two devices of {memory}: not even batch {min(failed)} runs."
    forecast = "as forecast" if largest["forecast"] == largest["largest"] else f"forecast {largest['forecast']}"
    limit = f"; {min(failed)} ran out of memory" if failed else ""
    more = "" if largest["is_exact"] else " or more"
    return (
        f"The largest batch of data parallel on two devices of {memory}, found by running in steps of "
        f"{largest['step']}: {largest['largest']}{more} ({forecast}){limit}."
    )
