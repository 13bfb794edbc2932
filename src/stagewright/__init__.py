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
    from stagewright.capture.capture import capture as capture
    from stagewright.capture.graph import UnitGraph as UnitGraph
    from stagewright.capture.stage import Stage as Stage
    from stagewright.engine.parallelize import parallelize as parallelize
    from stagewright.engine.trainer import Trainer as Trainer
    from stagewright.errors import StagewrightError as StagewrightError
    from stagewright.profile.measure import profile as profile
    from stagewright.profile.value import Profile as Profile
    from stagewright.split.compare import split as split
    from stagewright.split.value import Split as Split

__version__ = "0.1.0.dev0"

# Torch for Arm processors brings an allocator of its own, which gives memory back to the system ten milliseconds after
# it was freed, and reads this when it is loaded. Every step would ask for the same pages again (`keep_freed_memory`).
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")

# Public name → the module that defines it. `capture`, `profile` and `split` are packages too: each of these is
# callable as its function (see `callable_package`).
_HOMES = {
    "Profile": "stagewright.profile.value",
    "Split": "stagewright.split.value",
    "Stage": "stagewright.capture.stage",
    "StagewrightError": "stagewright.errors",
    "Trainer": "stagewright.engine.trainer",
    "UnitGraph": "stagewright.capture.graph",
    "capture": "stagewright.capture.capture",
    "parallelize": "stagewright.engine.parallelize",
    "profile": "stagewright.profile.measure",
    "split": "stagewright.split.compare",
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
