"""Step an optimizer on this worker's shards as plain tensors, where FSDP2 holds its parameters as DTensors.

    parameter, gradient, states: DTensors ─► their local tensors ─► step ─► new states become DTensors

An operator on a DTensor takes about 50 µs more than on its local tensor, and an optimizer runs a dozen for each
parameter: with many small parameters, that is several times the step itself. The states stay where they were, under
the DTensor parameter, so that checkpoints read them as before. Only for optimizers that change each element separately.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from stagewright.spec.optimizers import OPTIMIZERS


def changes_elements(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is one of torch's optimizers that change each element separately."""
    return type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__ in _ELEMENTWISE


_ELEMENTWISE = {rule.torch_name for rule in OPTIMIZERS.values()}


@torch.no_grad()
def step_shards(optimizer: torch.optim.Optimizer) -> None:
    """Run ``optimizer.step()`` on the local tensors of DTensor parameters."""
    shards: dict[DTensor, torch.Tensor] = {}
    before = [list(group["params"]) for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [_shard(parameter, optimizer, shards) for parameter in group["params"]]
        optimizer.step()
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters
        for parameter, shard in shards.items():
            _keep_states(optimizer, parameter, optimizer.state.pop(shard, {}))


def _shard(parameter: torch.Tensor, optimizer: torch.optim.Optimizer, shards: dict[DTensor, torch.Tensor]) -> Any:
    """Return a parameter's local tensor with its gradient; its states are found under it during the step."""
    if not isinstance(parameter, DTensor):
        return parameter
    shard = parameter.to_local().detach().requires_grad_(parameter.requires_grad)
    if parameter.grad is not None:
        shard.grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
    if parameter in optimizer.state:
        optimizer.state[shard] = {key: _local(value) for key, value in optimizer.state[parameter].items()}
    shards[parameter] = shard
    return shard


def _keep_states(optimizer: torch.optim.Optimizer, parameter: DTensor, states: dict[str, Any]) -> None:
    """Put the states of a step under the parameter; those that the step changed in place are there already."""
    for key, value in states.items():
        held = optimizer.state[parameter].get(key)
        if _local(held) is not value:
            optimizer.state[parameter][key] = _distributed(parameter, value)


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _distributed(parameter: DTensor, value: Any) -> Any:
    """Return a state of a shard's shape as a DTensor like the parameter; others, such as step counts, as they are."""
    if not isinstance(value, torch.Tensor) or not value.ndim or value.shape != parameter.to_local().shape:
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
