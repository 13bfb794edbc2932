"""Runs that are repeated in several rounds or with several seeds: speed-ups by round, accuracy over seeds. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagewright.runs.baseline import fastest_variant
from stagewright.runs.predictions import Predictions
from stagewright.runs.result import RunResult
from stagewright.studies.framework.phrases import spread
from stagewright.studies.framework.repeats import SUPERLINEAR, rate_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedValue:
    """What one training with a seed reached."""

    seed: int
    value: float
    """Metric × 100 after the last epoch."""
    predictions: Predictions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedValues:
    """The accuracy that the same training reaches with several seeds."""

    trained: tuple[SeedValue, ...] = ()

    @property
    def values(self) -> tuple[float, ...]:
        """Metric × 100 of each seed."""
        return tuple(training.value for training in self.trained)

    @property
    def by_seed(self) -> dict[int, SeedValue]:
        """What was reached with each seed."""
        return {training.seed: training for training in self.trained}

    @property
    def mean(self) -> float | None:
        """Mean over seeds; None without a value."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation over seeds; None with one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def shown(self) -> str:
        """95.9 ± 0.14; 95.9 with one seed, – without a value."""
        if self.mean is None:
            return "–"
        return f"{self.mean:.1f}" + (f" ± {self.deviation:.2f}" if self.deviation is not None else "")


@dataclass(frozen=True, kw_only=True)  # without slots, to be combined with SeedValues
class Speedups:
    """The speed-ups of a plan over one device."""

    speedups: tuple[float, ...]
    """Of each round; empty if a run failed its parity check."""
    implausible: tuple[float, ...] = ()
    """Those that were left out, because this number of devices can't reach them."""
    equal: bool
    """Whether every run passed its parity check."""
    margin: float = 0.05
    """With one round: relative difference up to which two plans can't be told apart."""

    @property
    def speedup(self) -> float | None:
        """The median; None if it is unknown."""
        return statistics.median(self.speedups) if self.speedups else None

    @property
    def range(self) -> str:
        """The range over rounds, or why there is none, and what was left out."""
        if not self.equal:
            return "parity check failed"
        left_out = ", ".join(f"{ratio:.2f}" for ratio in self.implausible)
        texts = (spread(self.speedups), f"(left out: {left_out}, more than devices)" if left_out else "")
        return " ".join(filter(None, texts))


def read_trained(results: Mapping[str, Any], seeds: Iterable[int], part: Callable[[int], str]) -> tuple[SeedValue, ...]:
    """Read what each training that succeeded reached after its last epoch; `part` names the part of a seed."""
    rows = {seed: results.get(part(seed)) for seed in seeds}
    return tuple(
        SeedValue(
            seed=seed,
            value=100 * row["epochs"][-1][row["metric"]],
            predictions=Predictions.from_dict(row.get("predictions")),
        )
        for seed, row in rows.items()
        if row is not None
    )


def read_rounds(results: Mapping[str, Any], part: str, rounds: int) -> dict[int, RunResult]:
    """Read the runs PART-1, PART-2, … by round; rounds without a run are left out.

    So are rounds, of three or more, that `is_outlier` finds: something else had the machine, or nothing else for once.
    Smaller changes of pace cancel out in ratios.
    """
    rows = {number: results.get(f"{part}-{number}") for number in range(1, rounds + 1)}
    runs = {
        number: RunResult.from_dict(row) for number, row in rows.items() if row is not None and "samples_per_s" in row
    }
    rates = [run.samples_per_s for run in runs.values()]
    return {number: run for number, run in runs.items() if not is_outlier(run.samples_per_s, rates)}


OUTLIER = 5.0
"""Factor between the rate of a round and the median of all rounds beyond which it is left out."""


def is_outlier(rate: float, rates: Sequence[float]) -> bool:
    """Whether the rate of one of three or more rounds is far from their median."""
    return len(rates) > 2 and rate_ratio((rate, statistics.median(rates))) > OUTLIER


def disturbances(results: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[str]:
    """Say what was repeated and which rounds were left out, and why; `names` are the parts' names for people."""
    rounds: dict[str, list[float]] = {}
    for part, row in results.items():
        rate = row.get("samples_per_s") if isinstance(row, Mapping) else None
        if not rate:
            continue
        name, is_round, _ = names[part].partition(", round ")
        if is_round:
            rounds.setdefault(name, []).append(rate)
        repeat = row.get("repeated")
        if repeat:
            shown = " then ".join(f"{value:.1f}" for value in repeat["samples_per_s"])
            yield f"{names[part]}: {repeat['reason']}, so it was repeated: {shown} samples/s; {rate:.1f} counts."
    for name, rates in rounds.items():
        if len(rates) < 2 or rate_ratio(rates) <= OUTLIER:
            continue
        left_out = [rate for rate in rates if is_outlier(rate, rates)]
        verdict = (
            f"left out: {', '.join(f'{rate:.1f}' for rate in left_out)}"
            if left_out
            else "two rounds can't tell which is right; use --rounds 3"
        )
        shown = ", ".join(f"{rate:.1f}" for rate in rates)
        yield f"{name}: rounds of {shown} samples/s differ by a factor of {rate_ratio(rates):.0f}: {verdict}."


def speedups_by_round(
    runs: Mapping[int, RunResult], baselines: Mapping[int, RunResult], num_devices: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Divide the throughput of each round by the baseline's; empty if any run failed its parity check.

    Returns:
        The speed-ups, and apart from them those that are left out, because this number of devices can't reach them.
    """
    if not all(run.equal for run in runs.values()):
        return (), ()
    ratios = []
    for number, run in runs.items():
        # A baseline that was repeated with this run counts instead of the round's.
        repeated_rate = run.extra.get("baseline_samples_per_s")
        if repeated_rate or number in baselines:
            ratios.append(run.samples_per_s / float(repeated_rate or baselines[number].samples_per_s))
    most = SUPERLINEAR * num_devices
    return tuple(ratio for ratio in ratios if ratio <= most), tuple(ratio for ratio in ratios if ratio > most)


def baseline_variation(runs: Iterable[Mapping[int, RunResult]], baselines: Mapping[int, RunResult]) -> float:
    """By how much a baseline changed that was repeated in its round: two speed-ups of that round may differ so too."""
    rates = {number: [baseline.samples_per_s] for number, baseline in baselines.items()}
    for by_round in runs:
        for number, run in by_round.items():
            repeated_rate = run.extra.get("baseline_samples_per_s")
            if repeated_rate and number in rates:
                rates[number].append(float(repeated_rate))
    return max((rate_ratio(of_round) - 1 for of_round in rates.values() if min(of_round)), default=0.0)


def choose_baseline(results: Mapping[str, Any], parts: Iterable[str], rounds: int) -> str | None:
    """Return which of several single-device parts is the baseline: the fastest, by its median over rounds."""
    runs = {part: read_rounds(results, part, rounds) for part in parts}
    return fastest_variant(
        {
            part: [1 / run.samples_per_s for run in by_round.values() if run.samples_per_s]
            for part, by_round in runs.items()
        }
    )


def median_rate(runs: Mapping[int, RunResult]) -> float:
    """The median throughput over rounds."""
    return statistics.median(run.samples_per_s for run in runs.values())
