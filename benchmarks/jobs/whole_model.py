"""A plan's whole model, timed around each step to measure the current speed of each device.

    both workers   model ─ step ─ model ─ step ─ model        the device speed of a step is that around it;
                   └─────┬─────┘                              the profile's units are scaled to it

Each core of a shared machine runs at either of two speeds, for seconds: a profile from seconds ago may have another
speed than a step.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from stagewright.cluster.device import Device
from stagewright.planner.costs.measure import ModelCosts, load_captured
from stagewright.planner.costs.tensor_shard import shard_alone
from stagewright.profiler.profile import Time
from stagewright.profiler.replay import Stopwatch
from stagewright.profiler.storage import tensors_in
from stagewright.spec.plan import Plan

__all__ = ["WholeModel", "WholeTime", "with_whole_time"]

WholeTime = tuple[float, float]
"""Seconds of forward and backward."""


class WholeModel:
    """One micro-batch of a plan's model; with tensor parallelism, of one worker's shard without its peers."""

    def __init__(self, plan: Plan) -> None:
        device = Device.parse(plan.devices[0])
        self._model, self._graph = load_captured(plan, device)
        if plan.mesh.tensor > 1:
            shard_alone(self._graph, plan.mesh.tensor)
        self._training = plan.training
        self._parameters = [parameter for parameter in self._model.module.parameters() if parameter.requires_grad]
        self._stopwatch = Stopwatch(device.torch_device())

    def sample(self) -> WholeTime:
        """Run forward and backward once, as a profile does for the whole model."""
        model = self._model
        with torch.set_grad_enabled(self._training):
            outputs, forward_s = self._stopwatch.time([lambda: self._graph.model(*model.args, **model.kwargs)])
        differentiable = [tensor for tensor in tensors_in(outputs[0]) if tensor.requires_grad]
        if not differentiable:
            return forward_s, 0.0
        gradients = [torch.ones_like(tensor) for tensor in differentiable]
        backward = [lambda: torch.autograd.grad(differentiable, self._parameters, gradients, allow_unused=True)]
        return forward_s, self._stopwatch.time(backward)[1]


def with_whole_time(measured: ModelCosts, whole: WholeTime) -> ModelCosts:
    """Return a measured model with another time of the whole model, to which its units are scaled."""
    forward_s, backward_s = whole
    profile = replace(
        measured.profile,
        whole_forward=Time(median_s=forward_s, spread_s=0.0),
        whole_backward=Time(median_s=backward_s, spread_s=0.0),
    )
    return replace(measured, profile=profile)
