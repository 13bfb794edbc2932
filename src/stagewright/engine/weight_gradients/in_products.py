"""Weight gradients of linear layers, added to the gradient so far inside their matrix product.

    autograd    dW = dyᵀ · x,  then  grad = grad + dW       two tensors of the weight's size are read, two are written
    here        grad = grad + dyᵀ · x                       one is read, one is written

The products are the same; only the memory traffic of gradient accumulation goes, and a sum is rounded once instead of
twice. The layers keep their modules, parameters and hooks: their ``forward`` is replaced in place.

    accumulate_in_products     eager backward: where ``grad`` exists already, from a step's second micro-batch on
    RecordedLinears            CUDA graphs: into tensors that stay where they are, also in compiled code
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from stagewright.graph.stage import Stage
from stagewright.spec.plan import Plan
from stagewright.spec.searched_order import splits_backward

MIN_EAGER_ELEMENTS = 2**22
"""The smallest weight for which an eager product in Python is worth its launch, which takes longer than autograd's."""
_Gradients: TypeAlias = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def find_linears(module: nn.Module, *, min_elements: int = 0) -> list[nn.Module]:
    """Return the linear layers whose weight gradient is one matrix product, each once."""
    return [
        layer
        for layer in module.modules()
        if (type(layer) is nn.Linear or _is_conv1d(layer))
        and "forward" not in layer.__dict__
        and type(layer.weight) is nn.Parameter
        and layer.weight.requires_grad
        and layer.weight.numel() >= min_elements
    ]


def accumulates_in_products(plan: Plan, device: torch.device) -> bool:
    """Whether eager backwards of this plan accumulate large weight gradients inside the product.

    Not where gradients are exchanged or sharded, whose hooks wait for autograd, and not where backward is split, which
    computes a layer's two gradients apart. On a CPU the product is compute-bound, and the addition is cheap.
    """
    return (
        device.type == "cuda"
        and plan.training
        and plan.microbatches > 1
        and plan.compile == "none"
        and plan.recompute != "attention"
        and not plan.attention_units
        and plan.mesh.num_workers == plan.mesh.pipeline
        and not any(splits_backward(plan, worker) for worker in range(plan.mesh.pipeline))
    )


def separate_share(plan: Plan, module: nn.Module, device: torch.device) -> float:
    """Return the share of a model's trained elements whose gradients are added up by themselves in eager backwards."""
    if not accumulates_in_products(plan, device):
        return 1.0
    sizes = {id(parameter): parameter.numel() for parameter in module.parameters() if parameter.requires_grad}
    inside = {id(layer.weight) for layer in find_linears(module, min_elements=MIN_EAGER_ELEMENTS)}
    return sum(size for key, size in sizes.items() if key not in inside) / max(1, sum(sizes.values()))


def accumulate_in_products(stages: Iterable[Stage]) -> None:
    """Let the large linear layers of these stages accumulate their weight gradients inside the product, in place.

    Only for gradients that nobody waits for: hooks on a parameter's gradient, as of DDP, would not run.
    """
    for stage in stages:
        for layer in find_linears(stage, min_elements=MIN_EAGER_ELEMENTS):
            layer.__dict__["forward"] = MethodType(_eager_forward, layer)


class RecordedLinears:
    """The linear layers of a stage that is recorded: they add to totals whose addresses the graphs keep.

    Units that the stage calls several times stay as they are: compiled code may write a total back as a whole, which
    autograd takes for a change of what the unit's other calls saved.
    """

    def __init__(self, stage: Stage, trained: Iterable[nn.Parameter], total: Callable[[nn.Parameter], torch.Tensor]):
        """``total``: returns the tensor in which a parameter's gradient is summed."""
        parameters = set(map(id, trained)) - _repeated_parameters(stage)
        layers: list[Any] = [layer for layer in find_linears(stage) if id(layer.weight) in parameters]
        self._weights: list[nn.Parameter] = list(dict.fromkeys(layer.weight for layer in layers))
        numbers = {weight: torch.tensor(number) for number, weight in enumerate(self._weights)}
        for layer in layers:
            # `data`: autograd need not know that graphs recorded before change what a later backward saved.
            layer.__dict__["_gradient_total"] = total(layer.weight).data
            layer.__dict__["_gradient_number"] = numbers[layer.weight]
            layer.__dict__["forward"] = MethodType(_recorded_forward, layer)
        self._layers = layers

    def _unchanged_totals(self) -> AbstractContextManager[Any]:
        """Hide changes of totals from autograd: a backward does not read them, and each runs more than once."""
        totals = tuple(layer._gradient_total for layer in self._layers)
        autograd: Any = torch.autograd
        return autograd._unsafe_preserve_version_counter(totals) if totals else nullcontext()

    def remove(self) -> None:
        """Give the layers their own forward back, and free the totals."""
        for layer in self._layers:
            for name in ("forward", "_gradient_total", "_gradient_number"):
                del layer.__dict__[name]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Add weight gradients to the totals in this block; outside of it the layers are plain."""
        global _is_active
        before, _is_active = _is_active, True
        try:
            with self._unchanged_totals():
                yield
        finally:
            _is_active = before

    @contextmanager
    def observed(self) -> Iterator[list[nn.Parameter]]:
        """Add nothing in this block; list the weights whose gradient it computes, at its end."""
        global _observed
        reached: list[nn.Parameter] = []
        before, _observed = _observed, []
        try:
            with self._unchanged_totals():
                yield reached
            reached += [self._weights[number] for number in dict.fromkeys(_observed)]
        finally:
            _observed = before


_is_active = False
_observed: list[int] | None = None


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add ``leftᵀ · right`` to a total; `data`, because a later backward of a repeated layer also saved the total."""
    total.data.addmm_(left.reshape(-1, left.shape[-1]).t(), right.reshape(-1, right.shape[-1]))


def _add_or_observe(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, number: torch.Tensor) -> None:
    if _observed is not None:
        _observed.append(int(number))
    else:
        _add_product(total, left, right)


# An operator, so that compiled code calls it as it is.
_library: Any = torch.library.Library("stagewright", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("add_product(Tensor(a!) total, Tensor left, Tensor right, Tensor number) -> ()")
_library.impl("add_product", _add_or_observe, "CompositeExplicitAutograd")
torch.library.register_fake("stagewright::add_product", lambda *_: None, lib=_library)


class _EagerLinear(torch.autograd.Function):
    """A linear layer that adds its weight gradient to ``weight.grad``."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: bool) -> Any:
        ctx.save_for_backward(value, weight)
        ctx.has_rows = rows
        return _linear(value, weight, bias, rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        value, weight = ctx.saved_tensors
        left, right = (gradient, value) if ctx.has_rows else (value, gradient)
        total = weight.grad
        if total is not None and total.dtype == gradient.dtype and total.layout == torch.strided:
            _add_product(total, left, right)
            product = None
        else:
            product = left.reshape(-1, left.shape[-1]).t() @ right.reshape(-1, right.shape[-1])
        return *_other_gradients(ctx, gradient, weight, product), None


class _RecordedLinear(torch.autograd.Function):
    """A linear layer that adds its weight gradient to a total of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: bool,
        total: torch.Tensor,
        number: torch.Tensor,
    ) -> Any:
        ctx.save_for_backward(value, weight, total, number)
        ctx.has_rows = rows
        return _linear(value, weight, bias, rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        value, weight, total, number = ctx.saved_tensors
        left, right = (gradient, value) if ctx.has_rows else (value, gradient)
        torch.ops.stagewright.add_product(total, left, right, number)
        return *_other_gradients(ctx, gradient, weight, None), None, None, None


def _other_gradients(
    ctx: Any, gradient: torch.Tensor, weight: torch.Tensor, product: torch.Tensor | None
) -> _Gradients:
    """Return the gradients of the input, the weight (``product``) and the bias."""
    of_value = gradient @ (weight if ctx.has_rows else weight.t()) if ctx.needs_input_grad[0] else None
    of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
    return of_value, product, of_bias


def _linear(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: bool) -> torch.Tensor:
    return functional.linear(value, weight if rows else weight.t(), bias)


def _eager_forward(layer: Any, value: torch.Tensor) -> torch.Tensor:
    rows = type(layer) is nn.Linear
    if not torch.is_grad_enabled() or torch.is_autocast_enabled(value.device.type):
        return _linear(value, layer.weight, layer.bias, rows)
    return _EagerLinear.apply(value, layer.weight, layer.bias, rows)  # type: ignore[no-any-return, no-untyped-call]


def _recorded_forward(layer: Any, value: torch.Tensor) -> torch.Tensor:
    rows = type(layer) is nn.Linear
    if not _is_active or not torch.is_grad_enabled() or torch.is_autocast_enabled(value.device.type):
        return _linear(value, layer.weight, layer.bias, rows)
    return _RecordedLinear.apply(  # type: ignore[no-any-return, no-untyped-call]
        value, layer.weight, layer.bias, rows, layer._gradient_total, layer._gradient_number
    )


def _repeated_parameters(stage: Stage) -> set[int]:
    """Return the identities of the parameters of units that are called more than once."""
    calls = Counter(node.target for node in stage.graph.nodes if node.op == "call_module")
    units = [stage.get_submodule(str(target)) for target, count in calls.items() if count > 1]
    return {id(parameter) for unit in units for parameter in unit.parameters()}


def _is_conv1d(layer: nn.Module) -> bool:
    """Whether this is transformers' ``Conv1D``, a linear layer whose weight is stored by columns."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__ == "transformers.pytorch_utils"
