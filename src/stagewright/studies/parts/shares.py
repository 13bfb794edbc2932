"""Where the time of a worker's step goes, in words: the shares that `traces.read_breakdown` reads. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from stagewright.studies.framework.phrases import percent

CATEGORIES = {
    "compute": "compute",
    "transfer": "sends and receives",
    "collective": "collectives",
    "bubble": "pipeline bubble",
    "wait": "waiting for a late peer",
    "overhead": "engine overhead",
}
"""Names for people of the categories that add up to a step."""


def shares_text(share: Mapping[str, Any]) -> str:
    """Write "compute 81 %, sends and receives 5.0 %, …" with every category of 0.5 % and more."""
    shares = {name: share[f"{name}_s"] / share["step_s"] for name in CATEGORIES}
    return ", ".join(f"{CATEGORIES[name]} {percent(part)}" for name, part in shares.items() if part >= 0.005)


def mean_shares_text(workers: Sequence[Mapping[str, Any]]) -> str:
    """Write "compute 72 %, most of the rest pipeline bubble (20 %)": the mean over workers."""
    means = {
        name: statistics.fmean(worker[f"{name}_s"] / worker["step_s"] for worker in workers) for name in CATEGORIES
    }
    text = f"compute {percent(means.pop('compute'))}"
    largest = max(means, key=lambda name: means[name])
    return (
        text
        if means[largest] < 0.005
        else f"{text}, most of the rest {CATEGORIES[largest]} ({percent(means[largest])})"
    )
