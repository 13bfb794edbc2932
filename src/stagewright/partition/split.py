"""Split a profiled model by one policy, at named cuts, or by all policies for comparison."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.errors import SplitError, UnknownName
from stagewright.partition.assess import assess
from stagewright.partition.conditions import Conditions
from stagewright.partition.registry import PlacedCuts, find_policy, policy_names
from stagewright.partition.split_result import Comparison, SkippedPolicy, Split
from stagewright.profiler.profile import Profile

_DEFAULTS = Conditions()


def split(profile: Profile, num_stages: int, policy: str = "optimal", conditions: Conditions = _DEFAULTS) -> Split:
    """Split a model into stages with a policy.

    Args:
        profile: The model's profile.
        num_stages: How many stages; ``client-server`` always makes three, on two devices.
        policy: parameters, macs, blocks, time, optimal, client-server, or your ``module:function``.
        conditions: Micro-batches, memory limits, links and speeds of the devices.

    Example:
        split = sw.split(profile, num_stages=2)
        print(split)
        print(split.cut_names)
    """
    registered = find_policy(policy)
    _check_stages(profile, num_stages)
    conditions.check_devices(registered.num_devices or num_stages, exactly=registered.num_devices is None)
    cuts = registered.choose(profile, num_stages, conditions)
    if isinstance(cuts, PlacedCuts):
        return assess(profile, policy, cuts.cuts, conditions, cuts.placement)
    if len(cuts) != num_stages - 1:
        raise SplitError(
            f"policy {policy!r} returned {len(cuts) + 1} stages of {profile.model!r} instead of {num_stages}"
        )
    return assess(profile, policy, cuts, conditions)


def split_at(profile: Profile, cuts: Sequence[str], conditions: Conditions = _DEFAULTS) -> Split:
    """Split a model after the named units or blocks; the policy of the result is `cuts`."""
    _check_stages(profile, len(cuts) + 1)
    indices = cuts_by_name(profile, cuts)
    conditions.check_devices(len(indices) + 1)
    return assess(profile, "cuts", indices, conditions)


def cuts_by_name(profile: Profile, names: Sequence[str]) -> tuple[int, ...]:
    """Return the indices of the units to cut after, in order; the names may be in any order.

    "encoder.layer.3" cuts after that unit, or after the last unit of that block.
    """
    after: dict[str, int] = {}
    for index, unit in enumerate(profile.units):
        if unit.block is not None:
            after[unit.block] = index
    # A unit's name takes precedence over a block of the same name (a block that is one unit, called twice).
    after.update({unit.name: index for index, unit in enumerate(profile.units)})
    cuts: dict[int, str] = {}
    for name in names:
        if name not in after:
            raise UnknownName("unit or block", name, after)
        index = after[name]
        if index == len(profile.units) - 1:
            raise SplitError(
                f"{name!r} is the last unit of {profile.model!r}, so there is nothing to cut after it: leave it out"
            )
        if index in cuts:
            raise SplitError(f"{name!r} and {cuts[index]!r} are the same cut of {profile.model!r}: leave one out")
        cuts[index] = name
    return tuple(sorted(cuts))


def compare(
    profile: Profile, num_stages: int, policies: Sequence[str] | None = None, conditions: Conditions = _DEFAULTS
) -> Comparison:
    """Split a model with each policy; by default with all that can be applied, and the reasons for the others."""
    _check_stages(profile, num_stages)
    conditions.check_devices(num_stages)
    if policies is not None:
        return Comparison(splits=tuple(split(profile, num_stages, name, conditions) for name in policies))
    splits, skipped = [], []
    for name in policy_names():
        registered = find_policy(name)
        if registered.num_devices is not None and registered.num_devices > num_stages:
            reason = f"policy {name!r} needs {registered.num_devices} devices, but there is {num_stages}"
            skipped.append(SkippedPolicy(policy=name, reason=reason))
            continue
        try:
            splits.append(split(profile, num_stages, name, conditions))
        except SplitError as error:
            if registered.required:
                raise
            skipped.append(SkippedPolicy(policy=name, reason=str(error)))
    return Comparison(splits=tuple(splits), skipped=tuple(skipped))


def _check_stages(profile: Profile, num_stages: int) -> None:
    num_units = len(profile.units)
    if num_stages < 1:
        raise SplitError(f"{num_stages} stages are not possible: give a number from 1 to {num_units}")
    if num_stages > num_units:
        raise SplitError(
            f"{num_stages} stages are not possible: {profile.model!r} has {num_units} units and so at most "
            f"{num_units} stages; use fewer stages or finer units (--units leaf)"
        )
