"""The experiments of the study *strategies*, with their measured speed and accuracy. Pure.

experiment    pipeline-2-4-even: a strategy, its workers, micro-batches and cut
speed         ratio to the single-device baseline of the same round; forecast where workers would share a device
accuracy      of each seed; sharing a device does not change it
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from stagewright.runs.result import RunResult
from stagewright.studies.framework.accuracy import AccuracyScale, accuracy_scale
from stagewright.studies.framework.forecasts import ForecastCheck, check_forecasts
from stagewright.studies.framework.rounds import (
    SeedValues,
    Speedups,
    baseline_variation,
    median_rate,
    read_rounds,
    read_trained,
    speedups_by_round,
)
from stagewright.studies.parts.measurements import noise_margin, why_rough

CLIENT = r"f([1-9]\d*)l([1-9]\d*)"
"""Name of a cut by the numbers of its first and last units at the client: f4l3."""
LARGE_KINDS = ("data", "accumulated", "pipeline")
"""How large batches run: data parallel, data parallel with gradient accumulation, pipeline with micro-batches."""
LARGE_NAMES = {"data": "data", "accumulated": "data, gradient accumulation", "pipeline": "pipeline"}
"""Names of these in tables."""


def large_part(kind: str, batch: int, workers: int) -> str:
    """Name the part that runs a large batch."""
    return f"large-{kind}-{batch}" + ("" if workers == 2 else f"-on-{workers}")


def large_training_part(kind: str, batch: int, workers: int, seed: int) -> str:
    """Name the part that trains with a large batch."""
    return f"large-train-{large_part(kind, batch, workers).removeprefix('large-')}-{seed}"


PUBLISHED: tuple[tuple[str, ...], ...] = (
    ("pipeline", "CIFAR-10", "MobileNetV2", "2", "64 (4)", "0.005", "95.89 ± 0.07", "228.57", "0.607"),
    ("data", "CIFAR-10", "MobileNetV2", "2", "64", "0.005", "95.83 ± 0.04", "376.47", "1"),
    ("pipeline", "CIFAR-10", "MobileNetV2", "4", "256 (4)", "0.02", "96.03 ± 0.14", "400.30", "1.07"),
    ("pipeline", "CIFAR-10", "MobileNetV2", "4", "256 (8)", "0.02", "96.07 ± 0.05", "397.30", "1.06"),
    ("data", "CIFAR-10", "MobileNetV2", "4", "256", "0.02", "95.94 ± 0.09", "627.22", "1.66"),
    ("pipeline", "RTE", "RoBERTa", "2", "32 (4)", "2e-5", "78.59 ± 0.21", "61.53", "0.80"),
    ("pipeline", "RTE", "RoBERTa", "2", "64 (4)", "4e-5", "77.56 ± 0.39", "68.82", "0.90"),
    ("data", "RTE", "RoBERTa", "2", "32", "2e-5", "79.0 ± 0.27", "76.19", "1"),
    ("pipeline", "RTE", "RoBERTa", "4", "64 (4)", "4e-5", "78.17 ± 0.44", "106.40", "1.40"),
    ("pipeline", "RTE", "RoBERTa", "4", "64 (2)", "4e-5", "78.15 ± 0.22", "96.40", "1.27"),
    ("data", "RTE", "RoBERTa", "4", "64", "4e-5", "78.4 ± 0.21", "95.53", "1.25"),
)
"""Of https://github.com/HaoKang-Timmy/Epipe, on GPUs; the speed-up is over data parallel on 2."""

PUBLISHED_LARGE = (
    "Published (torchgpipe, arXiv:2004.09910), ResNet-101 on GPUs, speed-up over data parallel on 2 GPUs: data "
    "parallel with batch 256 on 2: 1, 1k on 8: 3.365, 4k on 8: out of memory; pipeline with batch 256 on 2: 0.651, 1k "
    "on 8: 1.634, 4k on 8: 2.100."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A strategy on a number of workers."""

    strategy: str
    """data or pipeline."""
    workers: int
    microbatches: int = 1
    cut: str = ""
    """Of a pipeline: even, client (the first and last units on one worker, the rest on the other), or f4l3: client with
    the first 4 and the last 3 units."""

    @property
    def name(self) -> str:
        """data-2, pipeline-2-4-even."""
        parts = [self.strategy, str(self.workers)]
        return "-".join(parts + ([str(self.microbatches), self.cut] if self.cut else []))

    @property
    def shown(self) -> str:
        """data, pipeline, or pipeline, client/server."""
        if not self.is_client:
            return self.strategy
        counts = self.client_units
        return "pipeline, client/server" + (f", first {counts[0]} and last {counts[1]}" if counts else "")

    @property
    def is_client(self) -> bool:
        """Whether the first and last units are on one worker."""
        return self.cut not in ("", "even")

    @property
    def client_units(self) -> tuple[int, int] | None:
        """How many first and last units the client has; None: chosen from the profile."""
        match = re.fullmatch(CLIENT, self.cut)
        return None if match is None else (int(match[1]), int(match[2]))

    @property
    def full_name(self) -> str:
        """data, 2 workers; pipeline, client/server, 2 workers, 4 micro-batches."""
        pieces = f", {self.microbatches} micro-batches" if self.cut else ""
        return f"{self.shown}, {self.workers} workers{pieces}"


def list_experiments(
    workers: Sequence[int], microbatches: Sequence[int], cuts: Sequence[str]
) -> tuple[Experiment, ...]:
    """List data parallel and all pipelines on each number of workers; client and server are always two."""
    experiments = []
    for count in workers:
        experiments.append(Experiment(strategy="data", workers=count))
        experiments += [
            Experiment(strategy="pipeline", workers=count, microbatches=number, cut=cut)
            for cut in cuts
            if cut == "even" or count == 2
            for number in microbatches
        ]
    return tuple(experiments)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredExperiment(SeedValues, Speedups):
    """One experiment on one task; its speed-ups are measured or forecast."""

    experiment: Experiment
    batch: int
    """Samples per step."""
    learning_rate: float
    samples_per_s: float | None
    """Measured (median over rounds) or forecast; None: unknown."""
    forecast: float | None
    """The forecast speed-up; None: unknown."""
    is_measured: bool
    """Whether it was run with a device for each worker."""
    peak_bytes: tuple[int, ...]
    """Peak memory of each worker; empty if it was not run."""
    compute_ratio: float | None = None
    """How long all workers compute in a step, relative to one device for the same batch; None: unknown."""
    shares: tuple[Mapping[str, Any], ...] = ()
    """Where the time of each worker's step went, in the last round; empty if that is unknown."""

    @property
    def shown_batch(self) -> str:
        """64 (4): batch and micro-batches."""
        microbatches = self.experiment.microbatches
        return f"{self.batch} ({microbatches})" if self.experiment.strategy == "pipeline" else str(self.batch)


Experiments: TypeAlias = Mapping[str, Sequence[MeasuredExperiment]]


def round_ratios(data: Speedups, pipeline: Speedups) -> tuple[float, ...]:
    """Return the speed of the pipeline relative to data parallel in each of three or more rounds; else nothing."""
    if len(data.speedups) != len(pipeline.speedups) or len(data.speedups) < 3:
        return ()
    return tuple(ours / other for ours, other in zip(pipeline.speedups, data.speedups, strict=True))


def faster_strategy(data: Speedups, pipeline: Speedups) -> Literal["data", "pipeline", ""]:
    """Return which is faster, in every round and by more than the margin of a single run; "": they can't be told apart.

    Three or more rounds are compared one by one, each relative to its own baseline; two by their ranges.
    """
    if data.speedup is None or pipeline.speedup is None:
        return ""
    ratios = round_ratios(data, pipeline) or (
        min(pipeline.speedups) / max(data.speedups),
        max(pipeline.speedups) / min(data.speedups),
    )
    middle = statistics.median(ratios) if len(ratios) > 2 else pipeline.speedup / data.speedup
    if max(middle, 1 / middle) - 1 < data.margin:
        return ""
    return "pipeline" if min(ratios) > 1 else "data" if max(ratios) < 1 else ""


def task_scale(
    results: Mapping[str, Any], options: Mapping[str, Any], task: str, measured: Sequence[MeasuredExperiment]
) -> AccuracyScale:
    """How exactly the accuracies of a task are known."""
    recipe = options["recipes"][task]
    samples = results.get(f"data-{recipe.task}") or {}
    return accuracy_scale(recipe.task, recipe.metric, measured, samples.get("judged"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainLoop:
    """A plain torch loop on one device, next to the single-device baseline with the same batch."""

    samples_per_s: float
    baseline: float | None
    """Samples/s of the baseline; None: not measured."""
    ratios: tuple[float, ...]
    """Of each round, to the baseline."""


def plain_loop(results: Mapping[str, Any], options: Mapping[str, Any], task: str) -> PlainLoop | None:
    """Read the plain torch loop of a task."""
    runs = read_rounds(results, f"plain-{task}", options["rounds"])
    if not runs:
        return None
    baselines = read_rounds(results, f"speed-{task}-serial-2", options["rounds"])
    ratios = tuple(
        run.samples_per_s / baselines[number].samples_per_s for number, run in runs.items() if number in baselines
    )
    return PlainLoop(
        samples_per_s=median_rate(runs), baseline=median_rate(baselines) if baselines else None, ratios=ratios
    )


def case_name(options: Mapping[str, Any], case: str) -> str:
    """RTE, or RTE, batch 64 where the task is trained with several batches."""
    recipe = options["recipes"][case]
    others = [other for other in options["recipes"].values() if other.task == recipe.task]
    return f"{recipe.shown_data}, batch {recipe.batch}" if len(others) > 1 else str(recipe.shown_data)


def forecast_check(results: Mapping[str, Any], measured: Sequence[MeasuredExperiment]) -> ForecastCheck:
    """Compare the forecasts of a task's experiments with those that were measured."""
    pairs = [(row.speedup, row.forecast) for row in measured if row.is_measured]
    is_disturbed = any(row.implausible for row in measured if row.is_measured)
    return check_forecasts(pairs, busy=why_rough(results), is_disturbed=is_disturbed)


def measured_experiments(results: Mapping[str, Any], options: Mapping[str, Any], task: str) -> list[MeasuredExperiment]:
    """List the experiments of a task that were trained, timed or forecast, in order.

    Speeds that are only forecast are corrected or withheld as the measured ones demand.
    """
    rows = _experiments(results, options, task)
    check = forecast_check(results, rows)
    return [row if row.is_measured or row.forecast is None else _corrected(row, check) for row in rows]


def _corrected(row: MeasuredExperiment, check: ForecastCheck) -> MeasuredExperiment:
    assert row.forecast is not None
    speedup = check.corrected(row.forecast)
    if speedup is None:
        return replace(row, samples_per_s=None, speedups=())
    rate = None if row.samples_per_s is None else row.samples_per_s * speedup / row.forecast
    return replace(row, samples_per_s=rate, speedups=(speedup,))


def _compute_ratio(shares: Sequence[Mapping[str, Any]], baseline: RunResult | None) -> float | None:
    if not shares or baseline is None or not baseline.latency_s:
        return None
    return float(sum(share["compute_s"] for share in shares)) / baseline.latency_s


def _experiments(results: Mapping[str, Any], options: Mapping[str, Any], task: str) -> list[MeasuredExperiment]:
    recipe = options["recipes"][task]
    forecasts = results.get(f"forecast-{task}") or {}
    experiments = list_experiments(options["workers"], options["microbatches"], options["cuts"])
    rounds = options["rounds"]
    all_runs = {one.name: read_rounds(results, f"speed-{task}-{one.name}", rounds) for one in experiments}
    measured = []
    for experiment in experiments:
        trained = read_trained(results, options["seeds"], f"train-{task}-{experiment.name}-{{}}".format)
        runs = all_runs[experiment.name]
        baselines = read_rounds(results, f"speed-{task}-serial-{experiment.workers}", rounds)
        forecast = forecasts.get(experiment.name)
        same_baseline = (all_runs[one.name] for one in experiments if one.workers == experiment.workers)
        margin = max(noise_margin(results), baseline_variation(same_baseline, baselines))
        if not trained and not runs and forecast is None:
            continue
        if runs:
            rate: float | None = median_rate(runs)
            speedups, implausible = speedups_by_round(runs, baselines, experiment.workers)
        else:
            rate = forecast["samples_per_s"] if forecast is not None else None
            speedups, implausible = (forecast["speedup"],) if forecast is not None else (), ()
        shares = tuple(runs[max(runs)].extra.get("shares") or ()) if runs else ()
        measured.append(
            MeasuredExperiment(
                experiment=experiment,
                batch=recipe.batch * experiment.workers // 2,
                learning_rate=recipe.learning_rate * experiment.workers / 2,
                trained=trained,
                samples_per_s=rate,
                speedups=speedups,
                forecast=forecast["speedup"] if forecast is not None else None,
                is_measured=bool(runs),
                margin=margin,
                equal=all(run.equal for run in runs.values()),
                peak_bytes=runs[max(runs)].peak_memory_bytes if runs else (),
                implausible=implausible,
                shares=shares,
                compute_ratio=_compute_ratio(shares, baselines.get(max(runs, default=0))),
            )
        )
    return measured
