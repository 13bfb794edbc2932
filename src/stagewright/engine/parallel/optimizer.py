"""The optimizer of a plan, by the table of `spec.optimizers`; and optimizer steps inside backward.

    backward    … ◄── gradient of w, step w, free the gradient ◄── gradient of v, step v, free the gradient ◄── …

A parameter is stepped when autograd has accumulated its gradient, after every operation of this backward that uses it.
Parameters whose gradients are not final then, because another stage or worker adds to them, are stepped after the
backward, as without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

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
