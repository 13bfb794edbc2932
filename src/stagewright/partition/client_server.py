"""The client/server policy: data and labels never leave the client, which also holds the first and last units.

    client   first k units ─┐                       ┌─ last l units
    server                  └─ everything between ──┘

Always three stages on two devices. If k or l is not given, the policy takes the value with the shortest step time (then
the fewest bytes, then the smallest client). Memory is reported, but not part of the search.
"""

from __future__ import annotations

import numpy as np

from stagewright.errors import SplitError
from stagewright.partition.assess import is_training, unit_times
from stagewright.partition.conditions import Conditions
from stagewright.partition.registry import PlacedCuts
from stagewright.profiler.profile import Profile


def client_server(profile: Profile, num_stages: int, conditions: Conditions) -> PlacedCuts:
    """First and last units on one device (the client), the rest on another: three stages on two devices."""
    num_units = len(profile.units)
    num_first, num_last = conditions.client_first, conditions.client_last
    minimum = (1 if num_first is None else num_first, 1 if num_last is None else num_last)
    if min(minimum) < 1 or sum(minimum) >= num_units:
        raise SplitError(
            f"policy 'client-server' can't place the first {minimum[0]} and the last {minimum[1]} of the {num_units} "
            f"units of {profile.model!r} on the client: place at least 1 each there and leave at least 1 to the server"
        )
    firsts = np.array([num_first] if num_first is not None else range(1, num_units - 1))[:, None]
    lasts = np.array([num_last] if num_last is not None else range(1, num_units - 1))[None, :]
    step_s, sends_bytes = _costs(profile, conditions, firsts, lasts)
    size = firsts + lasts
    step_s = np.where(size < num_units, step_s, np.inf)
    best = np.lexsort((size.ravel(), sends_bytes.ravel(), step_s.ravel()))[0]
    row, column = np.unravel_index(best, size.shape)
    return PlacedCuts(cuts=(int(firsts[row, 0]) - 1, num_units - int(lasts[0, column]) - 1), placement=(0, 1, 0))


def _costs(
    profile: Profile, conditions: Conditions, firsts: np.ndarray, lasts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (step time, bytes sent) of every pair of first and last; an endless stream counts the bottleneck."""
    training, num_units = is_training(profile, conditions), len(profile.units)
    cumulative_s = np.cumsum([0.0, *(forward + backward for forward, backward in unit_times(profile, conditions))])
    crossing = np.array([unit.crossing_bytes for unit in profile.units])
    link_s = np.array([conditions.link_s(int(size), training=training) for size in crossing])
    # Boundaries; clipped if first and last leave no unit between them, which the caller excludes.
    start, end = firsts, np.maximum(num_units - lasts, 1)
    stages = [
        (cumulative_s[start] / conditions.speed(0), link_s[start - 1]),
        ((cumulative_s[end] - cumulative_s[start]) / conditions.speed(1), link_s[end - 1]),
        ((cumulative_s[-1] - cumulative_s[end]) / conditions.speed(0), np.zeros_like(cumulative_s[end])),
    ]
    busy = [np.maximum(compute, link) if conditions.overlap_links else compute + link for compute, link in stages]
    bottleneck_s = np.maximum(busy[0] + busy[2], busy[1])
    sends_bytes = crossing[start - 1] + crossing[end - 1]
    if conditions.num_microbatches is None:
        return bottleneck_s, sends_bytes
    first_microbatch_s = sum((compute + link for compute, link in stages), np.zeros_like(bottleneck_s))
    return first_microbatch_s + (conditions.num_microbatches - 1) * bottleneck_s, sends_bytes
