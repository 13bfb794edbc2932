"""The cost of a step as the objective: fewer devices are slower, but often cheaper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from stagewright.cluster.cluster import Cluster
from stagewright.errors import UsageError
from stagewright.planner.search.result import RankedPlan, SearchResult

Search: TypeAlias = Callable[[int], SearchResult]
"""Finds the best plans on so many devices."""


def merge_by_price(search: Search, cluster: Cluster, top: int) -> SearchResult:
    """Search on all devices and on a half, a quarter, … of them; rank all plans by the cost of a step."""
    if cluster.price_per_hour(cluster.num_devices) is None:
        raise UsageError(
            "the cluster states no price: write price = 2.5, the cost of a device for an hour, under [[devices]] in "
            "its file"
        )
    results, refused = [], []
    for count in device_counts(cluster.num_devices):
        try:
            results.append(search(count))
        except UsageError as error:  # nothing fits on so few devices
            refused.append(error)
    if not results:
        raise refused[0]
    merged = results[0]
    plans = [_priced(ranked, cluster) for result in results for ranked in result.best]
    plans.sort(key=lambda ranked: (ranked.price_per_step or 0.0, ranked.forecast.step_s))
    merged.best = plans[:top]
    merged.losers = {}
    merged.with_codec = None
    for name in ("serial", "data_parallel"):
        ranked = getattr(merged, name)
        setattr(merged, name, None if ranked is None else _priced(ranked, cluster))
    for result in results[1:]:
        merged.num_plans += result.num_plans
        merged.num_exact += result.num_exact
        merged.num_unfit += result.num_unfit
        merged.seconds += result.seconds
    return merged


def device_counts(num_devices: int) -> list[int]:
    """Return all devices, a half, a quarter, … of them.

    >>> device_counts(12)
    [12, 6, 3, 1]
    """
    counts = [num_devices]
    while counts[-1] > 1:
        counts.append(counts[-1] // 2)
    return counts


def _priced(ranked: RankedPlan, cluster: Cluster) -> RankedPlan:
    price = cluster.price_per_hour(ranked.plan.mesh.num_workers)
    assert price is not None
    return replace(ranked, price_per_step=price * ranked.forecast.step_s / 3600)
