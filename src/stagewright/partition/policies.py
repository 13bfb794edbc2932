"""The built-in policies, from the simplest to the exact one.

`parameters` is deliberately the plain rule that PiPPy's `split_into_equal_size` followed, because people ask
how good that is. `macs` and `time` are the exact best for what they look at (the least largest share, then
fewest bytes, then the most even), so that nothing but the measure itself can be blamed. `optimal` (its own
file) adds links, speeds and memory.
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

__all__ = ["block_runs"]


@policy("parameters")
def parameters(profile: Profile, num_stages: int, conditions: Conditions) -> Sequence[int]:
    """Equal size: fill each stage with units until the next would take it above total / stages.

    The last stage takes what is left; a unit above the threshold is a stage by itself. Unlike the original, it always
    gives the number of stages asked for: where units run short, each of the last ones becomes a stage.
    """
    units = profile.units
    if profile.parameters == 0:
        raise SplitError(f"{profile.model!r} has no parameters to share out: use policy 'macs' or 'time'")
    threshold = profile.parameters // num_stages
    cuts: list[int] = []
    start, size = 0, 0
    for index, unit in enumerate(units):
        if len(cuts) == num_stages - 1:
            break
        new = unit.parameters.total - sum(amount for other, amount in unit.parameters.shares if other >= start)
        short = len(units) - index == num_stages - 1 - len(cuts)
        if index > start and (short or (size > 0 and size + new > threshold)):
            cuts.append(index - 1)
            start, size, new = index, 0, unit.parameters.total
        size += new
    return cuts


@policy("macs")
def macs(profile: Profile, num_stages: int, conditions: Conditions) -> Sequence[int]:
    """Equal work: the least possible largest number of multiply-accumulates in a stage."""
    work = [unit.macs for unit in profile.units]
    if sum(work) == 0:
        raise SplitError(f"{profile.model!r} has no multiply-accumulates to share out: use policy 'time'")
    return _least_largest(profile, work, num_stages)


@policy("blocks")
def blocks(profile: Profile, num_stages: int, conditions: Conditions) -> Sequence[int]:
    """Whole repeated blocks, equally many a stage: the stem with the first, the tail with the last.

    Blocks left over go to the middle stages, as the outer ones have stem and tail; what stands between two blocks
    goes with the earlier one.
    """
    runs = block_runs(profile.units)
    if len(runs) < num_stages:
        raise SplitError(
            f"{profile.model!r} has {len(runs)} repeated blocks, too few for {num_stages} stages: "
            f"use at most {len(runs)} stages or another policy"
            if runs
            else f"{profile.model!r} has no repeated blocks to share out: use another policy"
        )
    each, left = divmod(len(runs), num_stages)
    middle = (num_stages - left) // 2
    cuts, taken = [], 0
    for stage in range(num_stages - 1):
        taken += each + (middle <= stage < middle + left)
        cuts.append(runs[taken][0] - 1)
    return cuts


@policy("time")
def time(profile: Profile, num_stages: int, conditions: Conditions) -> Sequence[int]:
    """Equal time: the least possible measured time of the slowest stage, on equal devices with free links."""
    seconds = [forward + backward for forward, backward in unit_times(profile, conditions)]
    total = sum(seconds)
    work = [round(second / total * 2**44) if total > 0 else 0 for second in seconds]
    return _least_largest(profile, work, num_stages)


policy("optimal", required=True)(optimal)


policy("client-server", num_devices=2)(client_server)


def block_runs(units: Sequence[UnitProfile]) -> list[tuple[int, int]]:
    """(first unit, last unit) of each repeated block; a block that is called again is another one."""
    runs: list[tuple[int, int]] = []
    for index, unit in enumerate(units):
        if unit.block is None:
            continue
        if runs and runs[-1][1] == index - 1 and units[index - 1].block == unit.block:
            opening = units[runs[-1][0]].name.partition("@")[0]
            if unit.name.partition("@")[0] != opening:
                runs[-1] = (runs[-1][0], index)
                continue
        runs.append((index, index))
    return runs


def _least_largest(profile: Profile, work: Sequence[int], num_stages: int) -> list[int]:
    """The exact best equal share of that work."""
    upto = np.concatenate([[0], np.cumsum(np.array(work, dtype=np.int64))])
    sends = np.array([0, *(unit.crossing_bytes for unit in profile.units)], dtype=np.int64)
    compute = np.tile(upto, (num_stages, 1))
    ends = best_cuts(Chain(compute=compute, link=np.zeros_like(compute), sends=sends))
    assert ends is not None, "without limits there is a split"
    return [end - 1 for end in ends[:-1]]
