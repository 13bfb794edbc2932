"""The cost of each unit of a model: time, memory, multiply-accumulates."""

from __future__ import annotations

from stagewright.files.keyed_cache import default_cache_folder
from stagewright.profiler.cache import ProfileCache
from stagewright.profiler.measure import profile
from stagewright.profiler.profile import Amount, Profile, StageTime, Time, UnitProfile, amount_of
from stagewright.profiler.stage_times import measure_stages

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
