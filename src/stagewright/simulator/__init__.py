"""The simulator: predicted timeline, memory and traffic of a plan's step, and where its speed-up is lost."""

from __future__ import annotations

from stagewright.simulator.costs.link_codec import LinkCodec
from stagewright.simulator.costs.overheads import EngineOverheads, ModelOverheads
from stagewright.simulator.costs.plan_costs import PlanCosts, plan_costs
from stagewright.simulator.costs.tensor_traffic import TensorTraffic
from stagewright.simulator.forecast import Forecast
from stagewright.simulator.simulate import predict, step_seconds
from stagewright.simulator.topology import Topology

__all__ = [
    "EngineOverheads",
    "Forecast",
    "LinkCodec",
    "ModelOverheads",
    "PlanCosts",
    "TensorTraffic",
    "Topology",
    "plan_costs",
    "predict",
    "step_seconds",
]
