"""The experts of each unit and the rows that they exchange, from one forward pass of the whole model."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from stagewright.engine.expert.apply import find_experts
from stagewright.engine.expert.layers import ExpertsPlan, count_assignments
from stagewright.graph.unit_graph import UnitGraph
from stagewright.simulator.costs.expert_traffic import ExpertTraffic


def record_expert_traffic(graph: UnitGraph, args: Any, kwargs: Any) -> tuple[ExpertTraffic, ...] | None:
    """Run the model once and return the expert traffic of each unit call; None if no experts can be divided."""
    experts = {graph.model.get_submodule(plan.name): plan for plan in find_experts(graph.model)}
    if not experts:
        return None
    traffic: list[ExpertTraffic] = []
    rows: list[int] = []
    depth = 0

    def begin(_module: nn.Module, _args: Any) -> None:
        nonlocal depth
        if depth == 0:
            rows.clear()
        depth += 1

    def end(module: nn.Module, _args: Any, _output: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            held = [(part, experts[part]) for part in module.modules() if part in experts]
            traffic.append(
                ExpertTraffic(
                    num_experts=math.gcd(*(plan.num_experts for _, plan in held)),
                    parameter_bytes=sum(_expert_bytes(part, plan) for part, plan in held),
                    row_bytes=tuple(rows),
                )
            )

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plan = experts[module]
        hidden, routing, _ = (*args, *(kwargs[name] for name in plan.arguments[len(args) :]))
        rows.append(count_assignments(routing, plan) * hidden.shape[-1] * hidden.element_size())

    with ExitStack() as stack, torch.no_grad():
        for module in dict.fromkeys(graph.module(call) for call in graph.calls):
            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(end).remove)
        for module in experts:
            stack.callback(module.register_forward_pre_hook(count, with_kwargs=True).remove)
        graph(*args, **kwargs)
    return tuple(traffic) if len(traffic) == len(graph.calls) else None


def _expert_bytes(module: nn.Module, plan: ExpertsPlan) -> int:
    held = module.parameters(recurse=not plan.stacked)
    return sum(value.numel() * value.element_size() for value in held)
