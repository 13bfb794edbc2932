"""Where to cut a model into stages: policies over a profile, and what each split costs."""

from __future__ import annotations

from stagewright.callable_package import make_callable
from stagewright.split import policies as _policies
from stagewright.split.assess import assess
from stagewright.split.compare import compare, split, split_at
from stagewright.split.conditions import Conditions, Schedule
from stagewright.split.registry import Placed, Policy, find_policy, policy, policy_names
from stagewright.split.value import Comparison, DeviceCost, Skipped, Split, StageCost

__all__ = [
    "Comparison",
    "Conditions",
    "DeviceCost",
    "Placed",
    "Policy",
    "Schedule",
    "Skipped",
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

make_callable(__name__, split)
