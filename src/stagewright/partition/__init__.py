"""Where to cut a model into stages: policies over a profile, and what each split costs."""

from __future__ import annotations

from stagewright.partition import policies as _policies
from stagewright.partition.assess import assess
from stagewright.partition.conditions import Conditions, Schedule
from stagewright.partition.registry import PlacedCuts, RegisteredPolicy, find_policy, policy, policy_names
from stagewright.partition.split import compare, split, split_at
from stagewright.partition.split_result import Comparison, DeviceCost, SkippedPolicy, Split, StageCost

__all__ = [
    "Comparison",
    "Conditions",
    "DeviceCost",
    "PlacedCuts",
    "RegisteredPolicy",
    "Schedule",
    "SkippedPolicy",
    "Split",
    "StageCost",
    "assess",
    "compare",
    "find_policy",
    "policy",
    "policy_names",
    "split",
    "split_at",
]

# Imported for the policies that they register.
del _policies
