"""A plan's model in one piece, timed again and again beside its steps: how fast each device is at that moment.

    both workers   whole ─ step ─ whole ─ step ─ whole        a step's device was as fast as around it
                   └─────┬─────┘                              the profile's units are scaled to that

Cores of a shared machine go at either of two speeds, for seconds, each on its own: a profile of some seconds ago is of
other speeds than a step's.
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

__all__ = ["WholeModel", "WholeTime", "with_whole"]

WholeTime = tuple[float, float]
"""Seconds of a forward and of a backward."""


class WholeModel:
    """One micro-batch of a plan's model, or of a worker's part of it where layers are shared, without its peers."""

    def __init__(self, plan: Plan) -> None:
        place = Device.parse(plan.devices[0])
        self._model, self._graph = load_captured(plan, place)
        if plan.mesh.tensor > 1:
            shard_alone(self._graph, plan.mesh.tensor)
        self._training = plan.training
        self._parameters = [one for one in self._model.module.parameters() if one.requires_grad]
        self._stopwatch = Stopwatch(place.torch_device())

    def sample(self) -> WholeTime:
        """Forward and backward once, as a profile times its whole model."""
        model = self._model
        with torch.set_grad_enabled(self._training):
            outputs, forward_s = self._stopwatch.time([lambda: self._graph.model(*model.args, **model.kwargs)])
        results = [one for one in tensors_in(outputs[0]) if one.requires_grad]
        if not results:
            return forward_s, 0.0
        ones = [torch.ones_like(one) for one in results]
        backward = [lambda: torch.autograd.grad(results, self._parameters, ones, allow_unused=True)]
        return forward_s, self._stopwatch.time(backward)[1]


def with_whole(measured: ModelCosts, around: WholeTime) -> ModelCosts:
    """A measured model whose units sum to what the whole took at another moment."""
    forward_s, backward_s = around
    profile = replace(
        measured.profile,
        whole_forward=Time(median_s=forward_s, spread_s=0.0),
        whole_backward=Time(median_s=backward_s, spread_s=0.0),
    )
    return replace(measured, profile=profile)
