"""The optimal policy: exact for stage and link times, unequal devices and limited memory.

It minimizes the bottleneck, the time of the slowest stage with its link (an exact min-max). Ties go to the smaller
latency (the sum over stages and links), then to fewer bytes, then to better balance. Devices are used in the given
order; their order is not searched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stagewright.errors import SplitError
from stagewright.partition.assess import is_training, unit_times
from stagewright.partition.chain import Chain, best_cuts
from stagewright.partition.conditions import Conditions
from stagewright.partition.memory import StageMemory
from stagewright.profiler.profile import Profile

# Times are counted in integer ticks, so that sums are exact. The longest possible latency has 2**43 to 2**44 ticks, far
# finer than any clock. A tick is a power of two of a second, so equal times stay equal.
_TICK_BITS = 44


def optimal(profile: Profile, num_stages: int, conditions: Conditions) -> Sequence[int]:
    """Exact optimum: the smallest bottleneck over stages and links, within memory limits, on unequal devices."""
    units = profile.units
    training = is_training(profile, conditions)
    seconds = np.array([forward + backward for forward, backward in unit_times(profile, conditions)])
    speeds = np.array([conditions.speed(device) for device in range(num_stages)])
    compute_s = seconds[None, :] / speeds[:, None]
    link_s = np.array([0.0, *(conditions.link_s(unit.crossing_bytes, training=training) for unit in units)])
    link_s[-1] = 0.0
    longest_s = float(compute_s.sum(axis=1).max() + link_s.sum())
    scale = _TICK_BITS - math.frexp(longest_s)[1]
    ticks = np.rint(np.ldexp(compute_s, scale)).astype(np.int64)
    link = np.tile(np.rint(np.ldexp(link_s, scale)).astype(np.int64), (num_stages, 1))
    memory = StageMemory(profile, conditions, training=training)
    limits = [conditions.memory_limit(device) for device in range(num_stages)]
    bounds = [limit for limit in limits if limit is not None]
    in_flight = [conditions.in_flight(stage, num_stages) for stage in range(num_stages)]
    chain = Chain(
        compute=np.concatenate([np.zeros((num_stages, 1), dtype=np.int64), np.cumsum(ticks, axis=1)], axis=1),
        link=link,
        sends=np.array([0, *(unit.crossing_bytes for unit in units)], dtype=np.int64),
        overlap=conditions.overlap_links,
        allowed=memory.fits(bounds, in_flight) if bounds else None,
    )
    ends = best_cuts(chain)
    if ends is None:
        raise _memory_error(profile, memory, bounds, in_flight)
    return [end - 1 for end in ends[:-1]]


def _memory_error(profile: Profile, memory: StageMemory, limits: Sequence[int], in_flight: Sequence[int]) -> SplitError:
    excess, stage = memory.least_excess(limits, in_flight)
    return SplitError(
        f"no split of {profile.model!r} into {len(limits)} stages fits in memory: the best one needs "
        f"{_readable(limits[stage] + excess)} on stage {stage}, {_readable(excess)} more than its limit of "
        f"{_readable(limits[stage])}; raise the limit, use more stages, smaller micro-batches or recompute"
    )


def _readable(num_bytes: int) -> str:
    """Format bytes with two decimals, or exactly if there are few."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"
