"""The policies by name, and how to add one.

@policy("halves")
def halves(profile: Profile, num_stages: int, conditions: Conditions) -> Sequence[int]:
    return [len(profile.units) // 2 - 1]        # cut after these units, by index

One that is not registered is named with its module: find_policy("shop:halves").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from operator import index
from typing import TypeAlias

from stagewright.errors import StagewrightError, UnknownName, UsageError
from stagewright.partition.conditions import Conditions
from stagewright.profiler.profile import Profile
from stagewright.user_code import describe, find, is_own, one_line

__all__ = ["PlacedCuts", "RegisteredPolicy", "SplitPolicy", "find_policy", "policy", "policy_names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedCuts:
    """What a policy returns that also says on which device each stage runs."""

    cuts: Sequence[int]
    """Indices of the units to cut after."""
    placement: Sequence[int]
    """The device of each stage."""


SplitPolicy: TypeAlias = Callable[[Profile, int, Conditions], "Sequence[int] | PlacedCuts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredPolicy:
    """A named way to choose the cuts."""

    name: str
    """Its name on the command line."""
    choose: SplitPolicy
    """Chooses the cuts: the indices of the units to cut after, stage i on device i, or a `PlacedCuts`."""
    required: bool
    """Whether a comparison of all policies fails with it; otherwise it is left out with its reason."""
    num_devices: int | None
    """How many devices it uses, where that is not the number of stages."""

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (self.choose.__doc__ or "").strip().split("\n")[0]


_POLICIES: dict[str, RegisteredPolicy] = {}


def policy(
    name: str, *, required: bool = False, num_devices: int | None = None
) -> Callable[[SplitPolicy], SplitPolicy]:
    """Register the decorated function as a policy."""

    def register(choose: SplitPolicy) -> SplitPolicy:
        if name in _POLICIES:
            raise UsageError(f"policy {name!r} exists already: give the new one another name")
        _POLICIES[name] = RegisteredPolicy(name=name, choose=choose, required=required, num_devices=num_devices)
        return choose

    return register


def policy_names() -> tuple[str, ...]:
    """All policies, in the order in which they were registered."""
    return tuple(_POLICIES)


def find_policy(name: str) -> RegisteredPolicy:
    """The policy of that name; a user's own function may be named with its module."""
    if is_own(name):
        return _own(name)
    if name not in _POLICIES:
        raise UnknownName("policy", name, _POLICIES)
    return _POLICIES[name]


def _own(name: str) -> RegisteredPolicy:
    """A user's own function, from its module; with what it was registered with, if it was."""
    function = find(name, "policy", "policy")
    if not callable(function) or isinstance(function, type):
        raise UsageError(
            f"{name!r} is {describe(function)}, not a policy; name a function of a profile, a number of stages and "
            "the conditions"
        )

    @wraps(function)
    def choose(profile: Profile, num_stages: int, conditions: Conditions) -> Sequence[int] | PlacedCuts:
        try:
            found = function(profile, num_stages, conditions)
        except StagewrightError:
            raise
        except Exception as error:  # anything that a user's code may raise
            raise UsageError(f"the policy {name!r} failed: {one_line(error)}") from error
        try:  # any whole numbers, numpy's too
            cuts = [index(one) for one in (found.cuts if isinstance(found, PlacedCuts) else found)]
        except TypeError:
            raise UsageError(
                f"the policy {name!r} returned {describe(found)}; let it return the indices of the units to cut after"
            ) from None
        return replace(found, cuts=cuts) if isinstance(found, PlacedCuts) else cuts

    registered = next((one for one in _POLICIES.values() if one.choose is function), None)
    num_devices = registered.num_devices if registered is not None else None
    return RegisteredPolicy(name=name, choose=choose, required=True, num_devices=num_devices)
