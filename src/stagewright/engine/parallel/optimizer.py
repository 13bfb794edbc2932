"""The optimizer of a plan, by the table of `spec.optimizers`; optimizer steps inside backward, and on FSDP's shards.

    backward    … ◄── gradient of w, step w, free the gradient ◄── gradient of v, step v, free the gradient ◄── …

A parameter is stepped when autograd has accumulated its gradient, after every operation of this backward that uses it.
Parameters whose gradients are not final then, because another stage or worker adds to them, are stepped after the
backward, as without.

    parameter, gradient, states: DTensors ─► their local tensors ─► step ─► new states become DTensors

An operator on a DTensor takes about 50 µs more than on its local tensor, and an optimizer runs a dozen for each
parameter: with many small parameters, that is several times the step itself. So FSDP2's shards are stepped as plain
tensors. The states stay where they were, under the DTensor parameter, so that checkpoints read them as before. Only for
optimizers that change each element separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from stagewright.spec.optimizers import OPTIMIZERS
from stagewright.spec.plan import OptimizerSpec

MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer for the parameters of one worker."""


def make_optimizer(spec: OptimizerSpec, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the plan's optimizer for this worker's parameters, with torch's fused kernel on a GPU."""
    rule = OPTIMIZERS[spec.name]
    options: dict[str, Any] = {"lr": spec.learning_rate, "weight_decay": spec.weight_decay}
    if rule.has_momentum:
        options["momentum"] = spec.momentum
    if rule.has_fused_kernel and all(value.is_cuda and value.is_floating_point() for value in parameters):
        options["fused"] = True
    make: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, rule.torch_name)
    return make(parameters, **options)


class OptimizerInBackward:
    """Steps parameters one by one while a backward runs."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        count_gradient: Callable[[nn.Parameter], AbstractContextManager[Any]],
    ) -> None:
        """``count_gradient(parameter)`` is entered while its gradient exists."""
        self.optimizer: torch.optim.Optimizer | None = None
        """The optimizer to step; None: gradients stay, for a step after the backward."""
        self.gradients: dict[str, torch.Tensor] | None = None
        """If not None, gradients are also copied to it, by parameter name."""
        self._count_gradient = count_gradient
        self._is_running = False
        for name, parameter in parameters.items():
            hook: Any = parameter.register_post_accumulate_grad_hook
            hook(partial(self._step, name))

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Step parameters inside the block."""
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def _step(self, name: str, parameter: nn.Parameter) -> None:
        if not self._is_running or self.optimizer is None or parameter.grad is None:
            return
        if self.gradients is not None:
            self.gradients[name] = parameter.grad.clone()
        with self._count_gradient(parameter):
            _step_alone(self.optimizer, parameter)
            parameter.grad = None


def _step_alone(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    """Step one parameter of an optimizer, with the options of its group."""
    before = [group["params"] for group in optimizer.param_groups]
    try:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = [parameter] if any(parameter is other for other in parameters) else []
        optimizer.step()
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters


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
