"""The step of a plan, predicted: timeline, memory, collectives, bytes; and why its speed-up is not n."""

from __future__ import annotations

from stagewright.forecast.costs import PlanCosts, TensorTraffic, plan_costs
from stagewright.forecast.link_codec import LinkCodec
from stagewright.forecast.predict import predict, step_seconds
from stagewright.forecast.terms import EngineTerms, ModelTerms
from stagewright.forecast.topology import Topology
from stagewright.forecast.value import Forecast

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
