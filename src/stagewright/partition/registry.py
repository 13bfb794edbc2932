"""The split policies by name, and how to add one.

    @policy("halves")
    def halves(profile: Profile, num_stages: int, conditions: Conditions) -> Sequence[int]:
        return [len(profile.units) // 2 - 1]        # cut after these units, by index

A policy that is not registered is found by its module: find_policy("shop:halves").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from operator import index
from typing import Protocol, TypeVar

from stagewright.errors import StagewrightError, UnknownName, UsageError
from stagewright.partition.conditions import Conditions
from stagewright.plugins import plugins
from stagewright.profiler.profile import Profile
from stagewright.user_code import describe, find, is_user_defined, one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedCuts:
    """Cuts together with the device of each stage."""

    cuts: Sequence[int]
    """Indices of the units to cut after."""
    placement: Sequence[int]
    """The device of each stage."""


class SplitPolicy(Protocol):
    """A function that chooses where to cut.

    It returns the indices of the units to cut after, in ascending order and one fewer than stages; stage i then runs on
    device i. `PlacedCuts` also chooses the devices.
    """

    def __call__(self, profile: Profile, num_stages: int, conditions: Conditions, /) -> Sequence[int] | PlacedCuts: ...


AnyPolicy = TypeVar("AnyPolicy", bound=SplitPolicy)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredPolicy:
    """A policy under its name."""

    name: str
    """Its name on the command line."""
    choose: SplitPolicy
    required: bool
    """Whether a comparison of all policies fails if this policy fails; otherwise the policy is skipped."""
    num_devices: int | None
    """How many devices it uses, if that is not the number of stages."""

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (self.choose.__doc__ or "").strip().split("\n")[0]


_POLICIES: dict[str, RegisteredPolicy] = {}


def policy(name: str, *, required: bool = False, num_devices: int | None = None) -> Callable[[AnyPolicy], AnyPolicy]:
    """Register the decorated function as a policy."""

    def register(choose: AnyPolicy) -> AnyPolicy:
        if name in _POLICIES:
            raise UsageError(f"policy {name!r} is registered already: give the new one another name")
        _POLICIES[name] = RegisteredPolicy(name=name, choose=choose, required=required, num_devices=num_devices)
        return choose

    return register


def policy_names() -> tuple[str, ...]:
    """Return the names of all policies, in the order of registration."""
    return tuple(_POLICIES)


def find_policy(name: str) -> RegisteredPolicy:
    """Return the policy of that name, or a user-defined function ``module:function``."""
    if is_user_defined(name):
        return _user_policy(name)
    if name not in _POLICIES:
        if name in plugins("policies"):
            return _user_policy(plugins("policies")[name])
        raise UnknownName("policy", name, [*_POLICIES, *plugins("policies")])
    return _POLICIES[name]


def _user_policy(name: str) -> RegisteredPolicy:
    """Import a user-defined function; if it is registered, with its registered number of devices."""
    function = find(name, "policy", "policy")
    if not callable(function) or isinstance(function, type):
        raise UsageError(
            f"{name!r} is {describe(function)}, not a policy; name a function that takes a profile, a number of stages "
            "and the conditions"
        )

    @wraps(function)
    def choose(profile: Profile, num_stages: int, conditions: Conditions) -> Sequence[int] | PlacedCuts:
        try:
            result = function(profile, num_stages, conditions)
        except StagewrightError:
            raise
        except Exception as error:  # anything that user code may raise
            raise UsageError(f"the policy {name!r} failed: {one_line(error)}") from error
        try:  # any integers, including numpy's
            cuts = [index(cut) for cut in (result.cuts if isinstance(result, PlacedCuts) else result)]
        except TypeError:
            raise UsageError(
                f"the policy {name!r} returned {describe(result)}; it must return the indices of the units to cut after"
            ) from None
        return replace(result, cuts=cuts) if isinstance(result, PlacedCuts) else cuts

    registered = next((entry for entry in _POLICIES.values() if entry.choose is function), None)
    num_devices = registered.num_devices if registered is not None else None
    return RegisteredPolicy(name=name, choose=choose, required=True, num_devices=num_devices)
