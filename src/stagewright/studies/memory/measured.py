"""The measured runs of the study *memory*, by variant. Pure.

variant    serial, data, tensor+recompute, …: a strategy without or with activation checkpointing
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from stagewright.studies.framework.rounds import (
    Speedups,
    baseline_variation,
    choose_baseline,
    median_rate,
    read_rounds,
    speedups_by_round,
)
from stagewright.studies.parts.measurements import noise_margin
from stagewright.trace.ideal import IdealStep, check_ideal

STRATEGIES = ("serial", "data", "tensor", "pipeline")
SINGLE = ("serial", "serial+recompute")
"""Variants on one device; the faster one is the baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredVariant(Speedups):
    """One variant over all rounds; the baseline is the fastest single-device variant."""

    strategy: str
    recompute: bool
    """Whether it used activation checkpointing."""
    samples_per_s: float
    """Median over rounds."""
    peak_bytes: tuple[int, ...]
    """Peak memory of each worker, over all rounds."""
    memory: Mapping[str, int]
    """Peak of the worker with the most, by category."""
    sent_bytes: int
    """Bytes that a step passes to links and collectives, over all workers."""

    def is_faster_than(self, other: MeasuredVariant) -> bool:
        """Whether every round is faster than every round of the other; with one round, by the margin."""
        if not self.speedups or not other.speedups:
            return False
        margin = self.margin if len(self.speedups) == 1 else 0.0
        return min(self.speedups) > (1 + margin) * max(other.speedups)

    @property
    def variant(self) -> str:
        """serial, data+recompute, …"""
        return f"{self.strategy}+recompute" if self.recompute else self.strategy

    @property
    def peak(self) -> int:
        """Peak memory of the worker with the most."""
        return max(self.peak_bytes)


Variants: TypeAlias = Mapping[str, MeasuredVariant]


@dataclass(frozen=True, slots=True, kw_only=True)
class IdealSpeedups:
    """What a strategy's own measured compute would reach: median over rounds of speed-ups over the baseline."""

    free: float
    """With free communication."""
    balanced: float
    """And with perfect balance, without a pipeline bubble."""
    endless: float | None
    """And on any number of devices; None: no bound."""


def ideal_speedups(results: Mapping[str, Any], variant: MeasuredVariant | None) -> IdealSpeedups | None:
    """Return the ideals of a strategy, at least its measured speed-up; RunError if a round beats one."""
    rounds = [] if variant is None else results.get(f"ideal-{variant.strategy}") or []
    if variant is None or variant.speedup is None or not rounds:
        return None
    for row in rounds:
        bounds = {name: row[name] for name in ("step_s", "free_s", "balanced_s", "endless_s")}
        check_ideal(IdealStep(**bounds), f"round {row['round']} of {variant.strategy}")

    def speedup(name: str) -> float:
        ratio: float = statistics.median(row["step_s"] / row[name] for row in rounds)
        return (variant.speedup or 0.0) * ratio

    is_bounded = all(row["endless_s"] > 0 for row in rounds)
    return IdealSpeedups(
        free=speedup("free_s"), balanced=speedup("balanced_s"), endless=speedup("endless_s") if is_bounded else None
    )


def baseline_variant(results: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """The baseline of every speed-up: the faster of one device without and with activation checkpointing."""
    fastest = choose_baseline(results, [f"run-{variant}" for variant in SINGLE], options["rounds"])
    return (fastest or "run-serial").removeprefix("run-")


def measured_variants(results: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, MeasuredVariant]:
    """List every variant that was run, by name."""
    rounds = options["rounds"]
    baselines = read_rounds(results, f"run-{baseline_variant(results, options)}", rounds)
    names = [f"{strategy}{more}" for strategy in STRATEGIES for more in ("", "+recompute")]
    all_runs = {name: read_rounds(results, f"run-{name}", rounds) for name in names}
    margin = max(noise_margin(results), baseline_variation(all_runs.values(), baselines))
    measured = {}
    for strategy in STRATEGIES:
        for recompute in (False, True):
            variant = f"{strategy}+recompute" if recompute else strategy
            runs = all_runs[variant]
            if not runs:
                continue
            first = runs[min(runs)]
            peaks = tuple(max(sizes) for sizes in zip(*(run.peak_memory_bytes for run in runs.values()), strict=True))
            speedups, implausible = speedups_by_round(runs, baselines, len(peaks))
            measured[variant] = MeasuredVariant(
                strategy=strategy,
                recompute=recompute,
                samples_per_s=median_rate(runs),
                speedups=speedups,
                implausible=implausible,
                peak_bytes=peaks,
                memory=asdict(first.memory[peaks.index(max(peaks))]),
                sent_bytes=first.sent_bytes,
                margin=margin,
                equal=all(run.equal for run in runs.values()),
            )
    return measured


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointingSavings:
    """Peak memory of the worker with the most, without and with activation checkpointing."""

    strategy: str
    without_bytes: int
    with_bytes: int
    extra_time: float | None
    """Of a step, relative to one without; None: it was not run, and `with_bytes` is a forecast."""

    @property
    def saved(self) -> float:
        """Share of the memory."""
        return 1 - self.with_bytes / self.without_bytes


def checkpointing_savings(results: Mapping[str, Any], variants: Variants) -> list[CheckpointingSavings]:
    """List what activation checkpointing saves under each strategy that was run: measured, or by forecast."""
    savings = []
    for strategy in STRATEGIES:
        without, checkpointed = variants.get(strategy), variants.get(f"{strategy}+recompute")
        forecast = (results.get(f"forecast-{strategy}") or {}).get(f"{strategy}+recompute") or {}
        if without is None or (checkpointed is None and not forecast.get("peak_memory_bytes")):
            continue
        savings.append(
            CheckpointingSavings(
                strategy=strategy,
                without_bytes=without.peak,
                with_bytes=forecast["peak_memory_bytes"] if checkpointed is None else checkpointed.peak,
                extra_time=None if checkpointed is None else checkpointing_cost(without, checkpointed),
            )
        )
    return savings


def shown_variant(variant: str) -> str:
    """Write a variant for people: "tensor with checkpointing", "one device"."""
    return variant.replace("serial", "one device").replace("+recompute", " with checkpointing")


def shown_loss(name: str) -> str:
    """Write what costs a step time as it is commonly called."""
    return {"bubble": "pipeline bubble", "imbalance": "load imbalance", "transfer": "sends and receives"}.get(
        name, name
    )


MAX_EXTRA_TIME = 1.0
"""Activation checkpointing repeats forwards, so it can't take a whole step more."""
NOISE = 0.05
"""Relative difference between two runs of few steps that is none."""


def checkpointing_cost(without: MeasuredVariant, checkpointed: MeasuredVariant) -> float:
    """Extra time of a step with activation checkpointing, relative to one without."""
    return without.samples_per_s / checkpointed.samples_per_s - 1


def is_possible_cost(cost: float) -> bool:
    """Whether activation checkpointing can cost this much: it repeats forwards, neither less nor more."""
    return -NOISE <= cost <= MAX_EXTRA_TIME
