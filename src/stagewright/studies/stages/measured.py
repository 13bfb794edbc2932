"""What the runs and forecasts of the study *stages* say, brought together. Pure.

A speed-up is the median over rounds of (pipeline's samples/s ÷ serial's samples/s of the same round); with several
rounds its range is known, and two splits whose ranges overlap are not told apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["PUBLISHED", "MeasuredRun", "forecast_speedup", "forecasts_of", "groups_of", "measured_runs", "serial_rate"]

PUBLISHED = {2: 1.94, 3: 3.07, 4: 4.09}
"""Speed-ups that were published for an image model in stages on 4 machines, inference (PiPPy)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """The runs of one split, one in each round."""

    policy: str
    """The policy that chose the split, and later ones that chose the same."""
    also: tuple[str, ...]
    num_stages: int
    """Stages."""
    samples_per_s: float
    """Median over rounds."""
    speedups: tuple[float, ...]
    """Over serial, of each round; none where a run is not equal to serial."""
    shared: bool
    """Whether stages shared a device."""
    sent_bytes: int
    """Bytes that a step sends over all cuts."""
    run: str
    """The run folder of the last round: the newest serial run beside it is of the same one."""

    @property
    def speedup(self) -> float | None:
        """The median; None where a run is not equal to serial."""
        return statistics.median(self.speedups) if self.speedups else None

    @property
    def policies(self) -> str:
        """All policies of this split."""
        return ", ".join((self.policy, *self.also))

    def is_apart_from(self, other: MeasuredRun) -> bool:
        """Whether all rounds of one are faster than all of the other; with one round, by 5 % or more."""
        if not self.speedups or not other.speedups:
            return False
        if len(self.speedups) == 1 or len(other.speedups) == 1:
            return abs(self.speedups[0] / other.speedups[0] - 1) >= 0.05
        return min(self.speedups) > max(other.speedups) or max(self.speedups) < min(other.speedups)


def measured_runs(results: Mapping[str, Any], options: Mapping[str, Any], mode: str) -> list[MeasuredRun]:
    """Every split that was run, in the order of stages and policies."""
    rounds = range(1, options["rounds"] + 1)
    serial = {turn: results.get(f"run-{mode}-serial-{turn}") for turn in rounds}
    found = []
    for count in options["stages"]:
        for policy in options["policies"]:
            rows = {turn: results.get(f"run-{mode}-{count}-{policy}-{turn}") for turn in rounds}
            pairs = [(row, serial[turn]) for turn, row in rows.items() if row is not None and "samples_per_s" in row]
            if not pairs:
                continue
            also = tuple(
                other
                for other in options["policies"]
                if any(
                    (results.get(f"run-{mode}-{count}-{other}-{turn}") or {}).get("same_as") == policy
                    for turn in rounds
                )
            )
            whole = all(row["equal"] for row, _ in pairs)
            found.append(
                MeasuredRun(
                    policy=policy,
                    also=also,
                    num_stages=count,
                    samples_per_s=statistics.median(row["samples_per_s"] for row, _ in pairs),
                    speedups=tuple(
                        row["samples_per_s"] / alone["samples_per_s"] for row, alone in pairs if alone is not None
                    )
                    if whole
                    else (),
                    shared=bool(pairs[0][0].get("shared")),
                    sent_bytes=sum(pairs[0][0]["link_bytes"].values()),
                    run=pairs[-1][0]["run"],
                )
            )
    return found


def groups_of(splits: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Policies that cut at the same places, together: their names and the split."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for policy, split in splits.items():
        if "error" not in split:
            groups.setdefault(tuple(split["cut_names"]), []).append(policy)
    return [(", ".join(names), splits[names[0]]) for names in groups.values()]


def forecasts_of(results: Mapping[str, Any], mode: str, count: int) -> list[tuple[str, Mapping[str, Any]]]:
    """Forecasts of one number of stages, policies of the same split together."""
    saved, forecast = results.get(f"profile-{mode}"), results.get(f"forecast-{mode}")
    if saved is None or forecast is None:
        return []
    found = []
    for names, split in groups_of(saved["splits"][str(count)]):
        one = forecast[str(count)][split["policy"]]
        if "speedup" in one:
            found.append((names, one))
    return found


def serial_rate(results: Mapping[str, Any], options: Mapping[str, Any], mode: str) -> float | None:
    """Serial's samples/s, the median over rounds."""
    rounds = range(1, options["rounds"] + 1)
    rates = [row["samples_per_s"] for turn in rounds if (row := results.get(f"run-{mode}-serial-{turn}")) is not None]
    return statistics.median(rates) if rates else None


def forecast_speedup(
    results: Mapping[str, Any], options: Mapping[str, Any], mode: str, forecast: Mapping[str, Any]
) -> float:
    """A forecast over what serial was measured to do, as measured speed-ups are; on another cluster over its own.

    Serial takes its batch in one piece, which is faster than the micro-batches that a forecast adds up.
    """
    alone = serial_rate(results, options, mode)
    if alone is None or options["cluster"] is not None:
        return float(forecast["speedup"])
    return float(forecast["samples_per_s"]) / alone
