"""Split a model into stages: policies that choose the cuts from a profile, and the cost of each split."""

from __future__ import annotations

from stagewright.partition import policies as _policies
from stagewright.partition.assess import assess
from stagewright.partition.conditions import Conditions, Schedule
from stagewright.partition.registry import PlacedCuts, RegisteredPolicy, SplitPolicy, find_policy, policy, policy_names
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
    "SplitPolicy",
    "StageCost",
    "assess",
    "compare",
    "find_policy",
    "policy",
    "policy_names",
    "split",
    "split_at",
]

# Former names, for plug-ins.
Placed = PlacedCuts
Policy = RegisteredPolicy
Skipped = SkippedPolicy

# Imported only to register the policies.
del _policies
