"""The client/server rule: data and labels never leave the client, which also keeps the first and last units.

    client   first k units ─┐                       ┌─ last l units
    server                  └─ everything between ──┘

Three stages on two devices, whatever the number of stages asked for. Where k or l is not given, it is the one with the
least step time of all (then the fewest bytes, then the smallest client); memory is reported, not searched for.
"""

from __future__ import annotations

import numpy as np

from stagewright.errors import SplitError
from stagewright.partition.assess import is_training, unit_times
from stagewright.partition.conditions import Conditions
from stagewright.partition.registry import PlacedCuts
from stagewright.profiler.profile import Profile

__all__ = ["client_server"]


def client_server(profile: Profile, num_stages: int, conditions: Conditions) -> PlacedCuts:
    """The first and last units on one device (the client), the rest on another: three stages on two devices."""
    num_units = len(profile.units)
    given_first, given_last = conditions.client_first, conditions.client_last
    least = (1 if given_first is None else given_first, 1 if given_last is None else given_last)
    if min(least) < 1 or sum(least) >= num_units:
        raise SplitError(
            f"policy 'client-server' can't keep the first {least[0]} and the last {least[1]} of the {num_units} units "
            f"of {profile.model!r} on the client: keep at least 1 each and leave at least 1 to the server"
        )
    firsts = np.array([given_first] if given_first is not None else range(1, num_units - 1))[:, None]
    lasts = np.array([given_last] if given_last is not None else range(1, num_units - 1))[None, :]
    step_s, sends_bytes = _costs(profile, conditions, firsts, lasts)
    size = firsts + lasts
    step_s = np.where(size < num_units, step_s, np.inf)
    best = np.lexsort((size.ravel(), sends_bytes.ravel(), step_s.ravel()))[0]
    row, column = np.unravel_index(best, size.shape)
    return PlacedCuts(
        cuts=(int(firsts[row, 0]) - 1, num_units - int(lasts[0, column]) - 1),
        placement=(0, 1, 0),
    )


def _costs(
    profile: Profile, conditions: Conditions, firsts: np.ndarray, lasts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(step time, bytes sent) of every pair of first and last; for an endless stream the bottleneck is the step."""
    training, num_units = is_training(profile, conditions), len(profile.units)
    upto_s = np.cumsum([0.0, *(forward + backward for forward, backward in unit_times(profile, conditions))])
    crossing = np.array([unit.crossing_bytes for unit in profile.units])
    link_s = np.array([conditions.link_s(int(size), training=training) for size in crossing])
    # Boundaries; clipped where first and last leave nothing between them, which the caller rules out.
    opening, closing = firsts, np.maximum(num_units - lasts, 1)
    parts = [
        (upto_s[opening] / conditions.speed(0), link_s[opening - 1]),
        ((upto_s[closing] - upto_s[opening]) / conditions.speed(1), link_s[closing - 1]),
        ((upto_s[-1] - upto_s[closing]) / conditions.speed(0), np.zeros_like(upto_s[closing])),
    ]
    busy = [np.maximum(compute, link) if conditions.overlap_links else compute + link for compute, link in parts]
    bottleneck_s = np.maximum(busy[0] + busy[2], busy[1])
    sends_bytes = crossing[opening - 1] + crossing[closing - 1]
    if conditions.num_microbatches is None:
        return bottleneck_s, sends_bytes
    fill_s = sum((compute + link for compute, link in parts), np.zeros_like(bottleneck_s))
    return fill_s + (conditions.num_microbatches - 1) * bottleneck_s, sends_bytes
