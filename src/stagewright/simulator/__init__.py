"""The step of a plan, predicted: timeline, memory, collectives, bytes; and why its speed-up is not n."""

from __future__ import annotations

from stagewright.simulator.costs import PlanCosts, TensorTraffic, plan_costs
from stagewright.simulator.forecast import Forecast
from stagewright.simulator.link_codec import LinkCodec
from stagewright.simulator.overheads import EngineTerms, ModelTerms
from stagewright.simulator.simulate import predict, step_seconds
from stagewright.simulator.topology import Topology

__all__ = [
    "EngineTerms",
    "Forecast",
    "LinkCodec",
    "ModelTerms",
    "PlanCosts",
    "TensorTraffic",
    "Topology",
    "plan_costs",
    "predict",
    "step_seconds",
]
