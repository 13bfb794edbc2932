"""What the runs of the study *strategies* say, brought together. Pure.

Way      pipeline-2-4-even: a strategy, its workers, micro-batches and how it is cut
speed    ratio to serial of the same round; where workers would share a device, forecast
accuracy of each seed; sharing a device does not change it
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["LARGE_KINDS", "PUBLISHED", "PUBLISHED_LARGE", "MeasuredWay", "Way", "measured_ways", "ways_of"]

LARGE_KINDS = ("data", "accumulated", "pipeline")
"""What large batches run as: replicas with their share in one piece, replicas in pieces, a pipeline in pieces."""

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
"""On GPUs; the speed-up is over data parallel on 2."""

PUBLISHED_LARGE = (
    "Published, ResNet-101 on GPUs, speed-up over data parallel on 2: data 256 on 2 1, 1k on 8 3.365, 4k on 8 out of "
    "memory; pipeline 256 on 2 0.651, 1k on 8 1.634, 4k on 8 2.100."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One experiment."""

    strategy: str
    """data or pipeline."""
    workers: int
    """Workers."""
    microbatches: int = 1
    """Pieces of a batch; 1 of data parallel."""
    cut: str = ""
    """even, or client: the first and last units on one worker, the rest on the other."""

    @property
    def name(self) -> str:
        """data-2, pipeline-2-4-even."""
        parts = [self.strategy, str(self.workers)]
        return "-".join(parts + ([str(self.microbatches), self.cut] if self.cut else []))

    @property
    def shown(self) -> str:
        """data, pipeline, pipeline (client/server)."""
        return "pipeline, client/server" if self.cut == "client" else self.strategy


def ways_of(workers: Sequence[int], microbatches: Sequence[int], cuts: Sequence[str]) -> tuple[Way, ...]:
    """Every experiment: data and pipelines on each number of workers; client and server are two."""
    found = []
    for count in workers:
        found.append(Way(strategy="data", workers=count))
        found += [
            Way(strategy="pipeline", workers=count, microbatches=pieces, cut=cut)
            for cut in ("even", "client")
            if cut in cuts and (cut == "even" or count == 2)
            for pieces in microbatches
        ]
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWay:
    """One experiment on one task."""

    way: Way
    """What it is."""
    batch: int
    """Samples in a step, and the rate."""
    learning_rate: float
    values: tuple[float, ...]
    """Accuracy after the last epoch in %, of each seed."""
    samples_per_s: float | None
    """Measured, the median over rounds, or forecast; None: not known."""
    speedups: tuple[float, ...]
    """Over serial: of each round, or the forecast's; none where a run is not equal to serial."""
    forecast: float | None
    """What was forecast over serial; None: nothing."""
    is_measured: bool
    """Whether it was run with a device for each worker."""
    equal: bool
    """Whether what was run was serial's."""
    peak_bytes: tuple[int, ...]
    """The most of each worker; empty where it was not run."""

    @property
    def mean(self) -> float | None:
        """Over seeds."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        """Over seeds; None with one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def speedup(self) -> float | None:
        """The median; None where it is not known."""
        return statistics.median(self.speedups) if self.speedups else None

    @property
    def shown_accuracy(self) -> str:
        """As tables have it: 95.9 ± 0.14."""
        if self.mean is None:
            return "–"
        return f"{self.mean:.1f}" + (f" ± {self.deviation:.2f}" if self.deviation is not None else "")

    @property
    def shown_batch(self) -> str:
        """64 (4)."""
        return f"{self.batch} ({self.way.microbatches})" if self.way.strategy == "pipeline" else str(self.batch)


def measured_ways(results: Mapping[str, Any], options: Mapping[str, Any], task: str) -> list[MeasuredWay]:
    """Every experiment of a task of which anything is known, in order."""
    lesson = options["lessons"][task]
    forecasts = results.get(f"forecast-{task}") or {}
    found = []
    for way in ways_of(options["workers"], options["microbatches"], options["cuts"]):
        trained = [results.get(f"train-{task}-{way.name}-{seed}") for seed in options["seeds"]]
        values = tuple(100 * one["epochs"][-1][one["metric"]] for one in trained if one is not None)
        pairs = []
        for turn in range(1, options["rounds"] + 1):
            row = results.get(f"speed-{task}-{way.name}-{turn}")
            alone = results.get(f"speed-{task}-serial-{way.workers}-{turn}")
            if row is not None:
                pairs.append((row, alone))
        forecast = forecasts.get(way.name)
        if not values and not pairs and forecast is None:
            continue
        equal = all(row["equal"] for row, _ in pairs)
        if pairs:
            rate: float | None = statistics.median(row["samples_per_s"] for row, _ in pairs)
            speedups = tuple(row["samples_per_s"] / one["samples_per_s"] for row, one in pairs if one is not None)
        else:
            rate = forecast["samples_per_s"] if forecast is not None else None
            speedups = (forecast["speedup"],) if forecast is not None else ()
        found.append(
            MeasuredWay(
                way=way,
                batch=lesson.batch * way.workers // 2,
                learning_rate=lesson.learning_rate * way.workers / 2,
                values=values,
                samples_per_s=rate,
                speedups=speedups if equal else (),
                forecast=forecast["speedup"] if forecast is not None else None,
                is_measured=bool(pairs),
                equal=equal,
                peak_bytes=tuple(pairs[-1][0]["peak_memory_bytes"]) if pairs else (),
            )
        )
    return found
