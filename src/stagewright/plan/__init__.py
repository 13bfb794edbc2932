"""The plan: everything that a run needs, its rules and its file."""

from __future__ import annotations

from stagewright.plan.check import check_plan
from stagewright.plan.file import read_plan, write_plan
from stagewright.plan.schedules import SCHEDULES
from stagewright.plan.value import Mesh, ModelSpec, OptimizerSpec, Plan

__all__ = ["SCHEDULES", "Mesh", "ModelSpec", "OptimizerSpec", "Plan", "check_plan", "read_plan", "write_plan"]
