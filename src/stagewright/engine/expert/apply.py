"""Expert parallelism: divide the experts of mixture-of-experts layers over replicas, derived from the model alone.

    plan = plan_expert_parallel(model, 2)       # which modules are divided, or an error with the reason
    axis = apply_expert_parallel(model, group)  # in place; ``axis.payload_bytes`` counts the all-to-alls

An experts module is called as ``experts(hidden_states, routing, routing_weights)``, as all of transformers' are that
follow its interface: rows of hidden states, the experts chosen for each row, and their weights.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from stagewright.engine.expert.axis import ExpertAxis
from stagewright.engine.expert.dropout import DropoutDraws, record_draws
from stagewright.engine.expert.layers import DividedExperts, ExpertsPlan, divide_experts, make_routing
from stagewright.engine.tensor.axis import process_group_of
from stagewright.engine.worker.broadcast import broadcast
from stagewright.errors import UsageError

_MASK_NAMES = ("selected_experts",)  # Switch passes a mask, all others pass numbers


def plan_expert_parallel(model: nn.Module, num_workers: int) -> tuple[ExpertsPlan, ...]:
    """Find the experts modules of a model; raise ``UsageError`` if there is none or one can't be divided."""
    plans = []
    for name, module in model.named_modules():
        if isinstance(module, DividedExperts):
            raise UsageError(f"{type(model).__name__} is already expert parallel; load the model again to divide it")
        if _is_experts(module):
            plans.append(_plan_module(name, module, num_workers))
        elif _is_named_experts(module):
            raise UsageError(
                f"expert={num_workers} can't divide {name} ({type(module).__name__}): it neither stacks its experts' "
                "weights nor has one submodule for each; use data or pipeline instead"
            )
    if not plans:
        raise UsageError(
            f"expert={num_workers} divides the experts of mixture-of-experts layers, and {type(model).__name__} has "
            "none; use data or pipeline instead"
        )
    return tuple(plans)


def find_experts(model: nn.Module) -> tuple[ExpertsPlan, ...]:
    """Find the experts modules of a model that can be divided; () if there is none or one can't be."""
    try:
        return plan_expert_parallel(model, 1)
    except UsageError:
        return ()


def apply_expert_parallel(
    model: nn.Module, group: Any, *, plans: tuple[ExpertsPlan, ...] | None = None, source_group: Any = None
) -> ExpertAxis:
    """Divide the experts of ``model`` in place over ``group``, a process group or a one-dimensional device mesh.

    Every worker must hold the same full weights before. ``source_group``: first receive the weights of its first
    worker, as data parallel replicas do.
    """
    axis = ExpertAxis(process_group_of(group))
    plans = plans or plan_expert_parallel(model, axis.num_workers)
    for plan in plans:
        module = model.get_submodule(plan.name)
        if source_group is not None:
            values = [value.detach() for value in module.parameters()]
            for value, received in zip(values, broadcast(values, values[0].device, group=source_group), strict=True):
                value.copy_(received)
        divide_experts(module, plan, axis, _dropout_draws(module, plan))
    return axis


def expert_parameters(model: nn.Module) -> dict[int, nn.Parameter]:
    """Return the parameters that are divided over the expert axis, by identity."""
    held = [parameter for module in model.modules() if isinstance(module, DividedExperts) for parameter in _own(module)]
    return {id(parameter): parameter for parameter in held}


def _own(module: DividedExperts) -> list[nn.Parameter]:
    """Return the divided parameters of a module: a norm that its experts share is not one of them."""
    parts = [module] if module._experts_plan.stacked else [part for part in module.modules() if part is not module]
    return [parameter for part in parts for parameter in part.parameters(recurse=False)]


def _is_experts(module: nn.Module) -> bool:
    """Return whether a module holds routed experts: by its weights, or by one submodule for each expert."""
    num_experts = getattr(module, "num_experts", None)
    if not isinstance(num_experts, int) or num_experts < 2:
        return False
    if isinstance(module, nn.ModuleDict):
        return all(f"expert_{index}" in module for index in range(num_experts))
    return any(value.ndim == 3 and value.shape[0] == num_experts for value in module.parameters(recurse=False))


def _is_named_experts(module: nn.Module) -> bool:
    """Return whether a module is called experts, but not shared ones, which every token uses."""
    name = type(module).__name__
    return "Experts" in name and "Shared" not in name and any(True for _ in module.parameters())


def _plan_module(name: str, module: nn.Module, num_workers: int) -> ExpertsPlan:
    num_experts: int = module.num_experts  # type: ignore[assignment]
    what = f"{name} ({type(module).__name__})"
    arguments = _argument_names(module)
    if len(arguments) != 3:
        raise UsageError(
            f"expert={num_workers} can't divide {what}: its forward takes {', '.join(arguments) or 'nothing'}, not "
            "hidden states, chosen experts and routing weights; use data or pipeline instead"
        )
    stacked = not isinstance(module, nn.ModuleDict)
    shapes = {key: tuple(value.shape) for key, value in module.named_parameters(recurse=False)}
    if stacked and (odd := next((key for key, shape in shapes.items() if shape[:1] != (num_experts,)), None)):
        raise UsageError(
            f"expert={num_workers} can't divide {what}: its {odd} has shape {list(shapes[odd])}, whose first dimension "
            f"is not its {num_experts} experts; use data or pipeline instead"
        )
    if num_experts % num_workers:
        fitting = max(count for count in range(1, num_workers + 1) if num_experts % count == 0)
        fix = f"use expert={fitting}" if fitting > 1 else "use data or pipeline instead"
        raise UsageError(f"expert={num_workers} does not divide the {num_experts} experts of {what}; {fix}")
    return ExpertsPlan(
        name=name,
        num_experts=num_experts,
        stacked=stacked,
        routing="mask" if arguments[1] in _MASK_NAMES else "index",
        arguments=tuple(arguments),
    )


def _argument_names(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def _dropout_draws(module: nn.Module, plan: ExpertsPlan) -> DropoutDraws:
    """Return the dropouts inside an expert of a whole module."""
    weight = next(value for value in module.parameters() if value.ndim > 1)
    row = torch.zeros(1, weight.shape[-1], dtype=weight.dtype, device=weight.device)
    index = torch.zeros(1, dtype=torch.long, device=weight.device)
    return record_draws(module, lambda: module(row, make_routing(index, plan), row.new_ones(1, 1)), weight.device)
