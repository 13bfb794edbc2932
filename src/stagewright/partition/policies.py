"""The built-in policies, from the simplest to the optimal one.

`parameters` is deliberately the simple rule of PiPPy's `split_into_equal_size`, for comparison. `macs` and `time` are
optimal for their measure (the smallest maximum, then fewest bytes, then best balance), so that a comparison shows the
effect of the measure alone. `optimal.py` adds links, speeds and memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stagewright.errors import SplitError
from stagewright.partition.assess import unit_times
from stagewright.partition.chain import Chain, best_cuts
from stagewright.partition.client_server import client_server
from stagewright.partition.conditions import Conditions
from stagewright.partition.optimal import optimal
from stagewright.partition.registry import policy
from stagewright.profiler.profile import Profile, UnitProfile


@policy("parameters")
def parameters(profile: Profile, num_stages: int, conditions: Conditions) -> Sequence[int]:
    """Equal size: fill each stage with units until the next one would exceed total / stages.

    The last stage gets the remaining units; a unit above the threshold is a stage by itself. Unlike the original, it
    always returns the requested number of stages: if units run short, each of the last ones becomes a stage.
    """
    units = profile.units
    if profile.parameters == 0:
        raise SplitError(f"{profile.model!r} has no parameters to distribute: use policy 'macs' or 'time'")
    threshold = profile.parameters // num_stages
    cuts: list[int] = []
    start, size = 0, 0
    for index, unit in enumerate(units):
        if len(cuts) == num_stages - 1:
            break
        added = unit.parameters.added(start)
        is_short = len(units) - index == num_stages - 1 - len(cuts)
        if index > start and (is_short or (size > 0 and size + added > threshold)):
            cuts.append(index - 1)
            start, size, added = index, 0, unit.parameters.total
        size += added
    return cuts


@policy("macs")
def macs(profile: Profile, num_stages: int, conditions: Conditions) -> Sequence[int]:
    """Equal work: the smallest possible maximum of multiply-accumulates per stage."""
    work = [unit.macs for unit in profile.units]
    if sum(work) == 0:
        raise SplitError(f"{profile.model!r} has no multiply-accumulates to distribute: use policy 'time'")
    return _min_max_cuts(profile, work, num_stages)


@policy("blocks")
def blocks(profile: Profile, num_stages: int, conditions: Conditions) -> Sequence[int]:
    """Whole repeated blocks, equally many per stage: the stem with the first, the head with the last.

    Remaining blocks go to the middle stages, because the outer ones have stem and head. Units between two blocks go
    with the earlier one.
    """
    runs = block_runs(profile.units)
    if len(runs) < num_stages:
        raise SplitError(
            f"{profile.model!r} has {len(runs)} repeated blocks, too few for {num_stages} stages: "
            f"use at most {len(runs)} stages or another policy"
            if runs
            else f"{profile.model!r} has no repeated blocks to distribute: use another policy"
        )
    per_stage, remaining = divmod(len(runs), num_stages)
    middle = (num_stages - remaining) // 2
    cuts, num_blocks = [], 0
    for stage in range(num_stages - 1):
        num_blocks += per_stage + (middle <= stage < middle + remaining)
        cuts.append(runs[num_blocks][0] - 1)
    return cuts


@policy("time")
def time(profile: Profile, num_stages: int, conditions: Conditions) -> Sequence[int]:
    """Equal time: the smallest possible time of the slowest stage, on equal devices with free links."""
    seconds = [forward + backward for forward, backward in unit_times(profile, conditions)]
    total = sum(seconds)
    work = [round(second / total * 2**44) if total > 0 else 0 for second in seconds]
    return _min_max_cuts(profile, work, num_stages)


policy("optimal", required=True)(optimal)


policy("client-server", num_devices=2)(client_server)


def block_runs(units: Sequence[UnitProfile]) -> list[tuple[int, int]]:
    """Return (first unit, last unit) of each repeated block; a block that is called twice counts twice."""
    runs: list[tuple[int, int]] = []
    for index, unit in enumerate(units):
        if unit.block is None:
            continue
        if runs and runs[-1][1] == index - 1 and units[index - 1].block == unit.block:
            first_name = units[runs[-1][0]].name.partition("@")[0]
            if unit.name.partition("@")[0] != first_name:
                runs[-1] = (runs[-1][0], index)
                continue
        runs.append((index, index))
    return runs


def _min_max_cuts(profile: Profile, work: Sequence[int], num_stages: int) -> list[int]:
    """Return the cuts with the smallest maximum of work per stage."""
    cumulative = np.concatenate([[0], np.cumsum(np.array(work, dtype=np.int64))])
    sends = np.array([0, *(unit.crossing_bytes for unit in profile.units)], dtype=np.int64)
    compute = np.tile(cumulative, (num_stages, 1))
    ends = best_cuts(Chain(compute=compute, link=np.zeros_like(compute), sends=sends))
    assert ends is not None, "without memory limits there is always a split"
    return [end - 1 for end in ends[:-1]]
