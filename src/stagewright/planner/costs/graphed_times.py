"""Times of units whose stages run as CUDA graphs: those of a profile, scaled to graphs of the whole model.

Units are profiled one by one, and a short one takes as long as its kernels take to launch. A graph launches them all at
once, so its time is that of the kernels alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from stagewright import structure
from stagewright.engine.batch.precision import autocast_of
from stagewright.engine.pipeline.cuda_graphs import GradientSums, GraphedForward
from stagewright.graph.compilation import compile_stage, compiled_units, keep_saved_tensors
from stagewright.graph.preserve import preserved
from stagewright.graph.unit_graph import UnitGraph
from stagewright.profiler.profile import Profile, Time
from stagewright.profiler.replay import Stopwatch, summarize, time_passes
from stagewright.profiler.whole_model import loss_or_output, scale_units
from stagewright.spec.plan import Compile, Plan
from stagewright.zoo.model import Model


def scale_to_graphs(
    profile: Profile, plan: Plan, model: Model, graph: UnitGraph, device: torch.device, mode: Compile, repeats: int
) -> Profile:
    """Return the profile with the times of CUDA graphs of the whole model; its backward accumulates gradients."""
    stage = graph.stage(0, len(graph.calls) - 1)
    if mode != "none":
        keep_saved_tensors()
    if mode == "stages":
        compile_stage(stage)
    parameters = [value for value in graph.model.parameters() if value.requires_grad] if plan.training else []
    autocast = functools.partial(autocast_of, plan, device)
    run = GraphedForward(
        stage, parameters, GradientSums(device), device=device, copies_outputs=False, autocast=autocast
    )
    inputs = graph.flatten(tuple(model.args), dict(model.kwargs))
    compiled = compiled_units(graph.module(call) for call in graph.calls) if mode == "units" else nullcontext()
    with preserved(graph.model), torch.set_grad_enabled(plan.training), compiled:
        passes = _Passes(run, inputs, graph.unflatten, Stopwatch(device))
        forward, backward = passes.time_each(repeats)
        first_s, following_s = time_passes(passes.time_sequence, repeats)
    run.linears.remove()
    for parameter in parameters:
        parameter.grad = None
    units = scale_units(profile.units, forward.median_s, backward.median_s)
    return replace(
        profile,
        units=units,
        whole_forward=forward,
        whole_backward=backward,
        first_pass_s=first_s,
        following_pass_s=following_s,
    )


class _Passes:
    """Forward and backward of the whole model as graphs."""

    def __init__(
        self, run: GraphedForward, inputs: list[Any], unflatten: Callable[[Any], Any], stopwatch: Stopwatch
    ) -> None:
        self._run, self._inputs, self._unflatten, self._stopwatch = run, inputs, unflatten, stopwatch

    def time_each(self, repeats: int) -> tuple[Time, Time]:
        """Time forward and backward, each alone; the first round records the graphs."""
        forward_s: list[float] = []
        backward_s: list[float] = []
        for _ in range(repeats + 1):
            (outputs,), seconds = self._stopwatch.time([self._forward])
            forward_s.append(seconds)
            self._set_gradients(outputs)
            if self._run.replayed is not None:
                backward_s.append(self._stopwatch.time([self._backward])[1])
        return summarize(forward_s[1:]), summarize(backward_s[1:])

    def time_sequence(self, count: int) -> float:
        """Time so many passes, one after the other."""

        def run() -> None:
            for _ in range(count):
                self._set_gradients(self._forward())
                self._backward()

        return self._stopwatch.time([run])[1]

    def _forward(self) -> Any:
        return self._run(self._inputs, 0)

    def _set_gradients(self, outputs: Any) -> None:
        if self._run.replayed is None:
            return
        for root in structure.tensors(loss_or_output(self._unflatten(outputs))):
            if root.requires_grad:
                root.grad = torch.ones_like(root)

    def _backward(self) -> None:
        if self._run.replayed is not None:
            self._run.replayed.backward()
