"""Stagewright: how to parallelise a PyTorch model on the devices you have.

    import stagewright as sw

    graph = sw.capture(model, (x,))                  # the model as calls of its own units
    profile = sw.profile(graph, (x,), name="mine")   # what each unit costs
    split = sw.split(profile, num_stages=4)          # where to cut

Names are loaded when they are first used, so importing this package does not import torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stagewright.engine.parallel.parallelize import parallelize as parallelize
    from stagewright.engine.parallel.trainer import Trainer as Trainer
    from stagewright.errors import StagewrightError as StagewrightError
    from stagewright.graph.capture import capture as capture
    from stagewright.graph.stage import Stage as Stage
    from stagewright.graph.unit_graph import UnitGraph as UnitGraph
    from stagewright.partition.split import split as split
    from stagewright.partition.values import Split as Split
    from stagewright.profiler.measure import profile as profile
    from stagewright.profiler.profile import Profile as Profile

__version__ = "0.1.0.dev0"

# Torch for Arm processors brings an allocator of its own, which gives memory back to the system ten milliseconds after
# it was freed, and reads this when it is loaded. Every step would ask for the same pages again (`keep_freed_memory`).
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")

# Public name → the module that defines it.
_HOMES = {
    "Profile": "stagewright.profiler.profile",
    "Split": "stagewright.partition.values",
    "Stage": "stagewright.graph.stage",
    "StagewrightError": "stagewright.errors",
    "Trainer": "stagewright.engine.parallel.trainer",
    "UnitGraph": "stagewright.graph.unit_graph",
    "capture": "stagewright.graph.capture",
    "parallelize": "stagewright.engine.parallel.parallelize",
    "profile": "stagewright.profiler.measure",
    "split": "stagewright.partition.split",
}

__all__ = [
    "Profile",
    "Split",
    "Stage",
    "StagewrightError",
    "Trainer",
    "UnitGraph",
    "capture",
    "parallelize",
    "profile",
    "split",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stagewright' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
