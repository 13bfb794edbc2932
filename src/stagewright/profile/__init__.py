"""What each unit of a model costs: time, memory, multiply-accumulates."""

from __future__ import annotations

from stagewright.callable_package import make_callable
from stagewright.profile.cache import ProfileCache, default_cache_folder
from stagewright.profile.measure import profile
from stagewright.profile.stages import measure_stages
from stagewright.profile.value import Amount, Profile, StageTime, Time, UnitProfile, amount_of

__all__ = [
    "Amount",
    "Profile",
    "ProfileCache",
    "StageTime",
    "Time",
    "UnitProfile",
    "amount_of",
    "default_cache_folder",
    "measure_stages",
    "profile",
]

make_callable(__name__, profile)
