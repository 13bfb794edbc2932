"""The plan: what a run does, the rules it must satisfy, and its TOML file."""

from __future__ import annotations

from stagewright.schedules.rules import SCHEDULES
from stagewright.spec.plan import Mesh, ModelSpec, OptimizerSpec, Plan
from stagewright.spec.plan_file import read_plan, write_plan
from stagewright.spec.plan_rules import check_plan

__all__ = ["SCHEDULES", "Mesh", "ModelSpec", "OptimizerSpec", "Plan", "check_plan", "read_plan", "write_plan"]
