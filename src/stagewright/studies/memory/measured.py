"""What the runs of the study *memory* say, brought together. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Measured", "measured_ways", "shown_way"]

STRATEGIES = ("serial", "data", "tensor", "pipeline")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One strategy, without or with recomputation, over all rounds."""

    strategy: str
    """serial, data, tensor, pipeline."""
    recompute: bool
    """Whether forward passes were run again."""
    samples_per_s: float
    """Median over rounds."""
    speedups: tuple[float, ...]
    """Over serial without recomputation, of each round; none where a run is not equal to serial."""
    peak_bytes: tuple[int, ...]
    """The most of each worker."""
    memory: Mapping[str, int]
    """Of the worker with most, by what it is for."""
    sent_bytes: int
    """Bytes that a step gives to links and collectives, over all workers."""
    equal: bool
    """Whether loss, gradients and buffers were serial's."""

    @property
    def way(self) -> str:
        """serial, data+recompute, …"""
        return f"{self.strategy}+recompute" if self.recompute else self.strategy

    @property
    def speedup(self) -> float | None:
        """The median; None where it is not known."""
        return statistics.median(self.speedups) if self.speedups else None

    @property
    def peak(self) -> int:
        """Of the worker with most."""
        return max(self.peak_bytes)


def measured_ways(results: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Measured]:
    """Every strategy that was run, without and with recomputation, by name."""
    rounds = range(1, options["rounds"] + 1)
    found = {}
    for strategy in STRATEGIES:
        for recompute in (False, True):
            way = f"{strategy}+recompute" if recompute else strategy
            rows = {turn: row for turn in rounds if (row := results.get(f"run-{way}-{turn}")) is not None}
            if not rows:
                continue
            equal = all(row["equal"] for row in rows.values())
            ratios = [
                row["samples_per_s"] / alone["samples_per_s"]
                for turn, row in rows.items()
                if (alone := results.get(f"run-serial-{turn}")) is not None
            ]
            first = next(iter(rows.values()))
            peaks = tuple(
                max(sizes) for sizes in zip(*(row["peak_memory_bytes"] for row in rows.values()), strict=True)
            )
            sent = sum(first["link_bytes"].values()) + sum(sum(one.values()) for one in first["collective_bytes"])
            found[way] = Measured(
                strategy=strategy,
                recompute=recompute,
                samples_per_s=statistics.median(row["samples_per_s"] for row in rows.values()),
                speedups=tuple(ratios) if equal else (),
                peak_bytes=peaks,
                memory=first["memory"][peaks.index(max(peaks))],
                sent_bytes=sent,
                equal=equal,
            )
    return found


def shown_way(way: str) -> str:
    """For people: "tensor, recomputed"."""
    return way.replace("+recompute", ", recomputed")
