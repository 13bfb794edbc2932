"""Stagewright: parallelize a PyTorch model on the devices you have.

    import stagewright as sw

    graph = sw.capture(model, (x,))              # the model as a graph of its units
    profile = sw.profile(graph, (x,))            # parameters, MACs, time and memory of each unit
    print(sw.split(profile, num_stages=4))       # where to cut it into pipeline stages

    print(sw.compare("gpt2", devices=2))         # run every strategy, verified against the single-device baseline
    sw.plan("gpt2", cluster="cluster.toml").write("plan.toml")
    trainer = sw.parallelize(model, batch, plan="plan.toml", loss=loss_fn, optimizer=make_adamw)

Names are loaded when they are first used, so importing this package does not import torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stagewright.analytic.forecast import AnalyticForecast as AnalyticForecast
    from stagewright.analytic.layout import Layout as Layout
    from stagewright.api.compare import Comparison as Comparison, compare as compare
    from stagewright.api.export import export as export
    from stagewright.api.fit import FitResult as FitResult, fit as fit
    from stagewright.api.forecast import explain as explain, forecast as forecast
    from stagewright.api.plan import PlanResult as PlanResult, plan as plan
    from stagewright.api.run import Run as Run
    from stagewright.api.train import TrainingResult as TrainingResult, train as train
    from stagewright.attachment.attach import attach as attach
    from stagewright.cluster.cluster import Cluster as Cluster
    from stagewright.cluster.device import Device as Device
    from stagewright.codecs.base import Codec as Codec
    from stagewright.engine.parallel.parallelize import parallelize as parallelize
    from stagewright.engine.parallel.trainer import Trainer as Trainer
    from stagewright.errors import RunError as RunError, StagewrightError as StagewrightError, UsageError as UsageError
    from stagewright.exporters.config import ExportedConfig as ExportedConfig
    from stagewright.graph.capture import capture as capture
    from stagewright.graph.unit_graph import UnitGraph as UnitGraph
    from stagewright.partition.registry import SplitPolicy as SplitPolicy
    from stagewright.partition.split import split as split
    from stagewright.partition.split_result import Split as Split
    from stagewright.planner.explain import Explanation as Explanation
    from stagewright.profiler.measure import profile as profile
    from stagewright.profiler.profile import Profile as Profile
    from stagewright.simulator.forecast import Forecast as Forecast
    from stagewright.spec.plan import Plan as Plan
    from stagewright.verification.context import verify as verify
    from stagewright.zoo.model import Batch as Batch, Model as Model

__version__ = "0.1.0.dev0"

# PyTorch for Arm processors has its own allocator, which returns freed memory to the system after 10 ms, so that every
# step would request the same pages again. It reads this variable when it is loaded.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")

# Public name → the module that defines it.
_HOMES = {
    "AnalyticForecast": "stagewright.analytic.forecast",
    "Batch": "stagewright.zoo.model",
    "Cluster": "stagewright.cluster.cluster",
    "Codec": "stagewright.codecs.base",
    "Comparison": "stagewright.api.compare",
    "Device": "stagewright.cluster.device",
    "Explanation": "stagewright.planner.explain",
    "ExportedConfig": "stagewright.exporters.config",
    "FitResult": "stagewright.api.fit",
    "Forecast": "stagewright.simulator.forecast",
    "Layout": "stagewright.analytic.layout",
    "Model": "stagewright.zoo.model",
    "Plan": "stagewright.spec.plan",
    "PlanResult": "stagewright.api.plan",
    "Profile": "stagewright.profiler.profile",
    "Run": "stagewright.api.run",
    "RunError": "stagewright.errors",
    "Split": "stagewright.partition.split_result",
    "SplitPolicy": "stagewright.partition.registry",
    "StagewrightError": "stagewright.errors",
    "Trainer": "stagewright.engine.parallel.trainer",
    "TrainingResult": "stagewright.api.train",
    "UnitGraph": "stagewright.graph.unit_graph",
    "UsageError": "stagewright.errors",
    "attach": "stagewright.attachment.attach",
    "capture": "stagewright.graph.capture",
    "compare": "stagewright.api.compare",
    "explain": "stagewright.api.forecast",
    "export": "stagewright.api.export",
    "fit": "stagewright.api.fit",
    "forecast": "stagewright.api.forecast",
    "parallelize": "stagewright.engine.parallel.parallelize",
    "plan": "stagewright.api.plan",
    "profile": "stagewright.profiler.measure",
    "split": "stagewright.partition.split",
    "train": "stagewright.api.train",
    "verify": "stagewright.verification.context",
}

__all__ = [
    "AnalyticForecast",
    "Batch",
    "Cluster",
    "Codec",
    "Comparison",
    "Device",
    "Explanation",
    "ExportedConfig",
    "FitResult",
    "Forecast",
    "Layout",
    "Model",
    "Plan",
    "PlanResult",
    "Profile",
    "Run",
    "RunError",
    "Split",
    "SplitPolicy",
    "StagewrightError",
    "Trainer",
    "TrainingResult",
    "UnitGraph",
    "UsageError",
    "attach",
    "capture",
    "compare",
    "explain",
    "export",
    "fit",
    "forecast",
    "parallelize",
    "plan",
    "profile",
    "split",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stagewright' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
