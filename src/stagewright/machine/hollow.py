"""Hollow models: every parameter is one element, expanded to its shape, so that a model of any size takes no memory.

    with parameters_on_meta(): module = build()      parameters are never allocated; buffers are
    make_hollow(module)                              each parameter is one element, on a device
    with skip_products(): capture(module, …)         products with such weights are not computed

A hollow model runs and can be captured, with meaningless values. A worker fills the parameters of its part from files.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.bmm.default: (0, 1),
    _aten.baddbmm.default: (1, 2),
}
"""For each product: the positions of its two factors."""
_GROUPED = {"aten::_grouped_mm", "transformers::grouped_mm_fallback"}
"""Products of groups of rows with a matrix for each group, as of experts; by name, since older versions lack them.

Their kernels refuse hollow matrices.
"""


def is_hollow(tensor: torch.Tensor) -> bool:
    """Whether all elements of a tensor are one element."""
    return tensor.numel() > 1 and not any(tensor.stride())


def is_hollow_model(module: nn.Module) -> bool:
    """Whether a module has hollow parameters."""
    return any(map(is_hollow, module.parameters()))


def hollow_parameter(
    parameter: torch.Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> nn.Parameter:
    """Return a hollow parameter with the shape of another."""
    element = torch.zeros((), dtype=dtype or parameter.dtype, device=device or parameter.device)
    return nn.Parameter(element.expand(parameter.shape), requires_grad=parameter.requires_grad)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device as it is registered, in the code inside; buffers have their values."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            on_meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            module._parameters[name] = on_meta

    setattr(nn.Module, "register_parameter", register_on_meta)  # noqa: B010 - mypy refuses to assign a method
    try:
        yield
    finally:
        setattr(nn.Module, "register_parameter", register)  # noqa: B010


def make_hollow(
    module: nn.Module, *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> nn.Module:
    """Replace all parameters by hollow ones, in place; tied ones stay tied. ``dtype``: that of floating-point ones."""
    replaced: dict[int, nn.Parameter] = {}
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in replaced:
                kind = dtype if parameter.is_floating_point() else None
                replaced[id(parameter)] = hollow_parameter(parameter, dtype=kind, device=device)
            submodule._parameters[name] = replaced[id(parameter)]
    return module


def copy_hollow(model: nn.Module) -> nn.Module | None:
    """Return a hollow copy of a model, ``None`` if it has attributes that can't be copied; it shares the buffers."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    memo |= {id(parameter): hollow_parameter(parameter) for parameter in model.parameters()}
    try:
        return copy.deepcopy(model, memo)
    except Exception:  # whatever an attribute of the user's raises
        return None


@contextmanager
def skip_products() -> Iterator[None]:
    """Return zeros for products with a hollow factor, which would copy that factor to its full size."""
    with _SkipProducts():  # type: ignore[no-untyped-call]
        yield


class _SkipProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces matrix products with a hollow factor by their result: the element is zero."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        factors = _PRODUCTS.get(func)
        if func.name() in _GROUPED and is_hollow(args[1]):
            return args[0].new_zeros((*args[0].shape[:-1], args[1].shape[-1]))
        if factors is not None:
            left, right = (args[position] for position in factors)
            if is_hollow(left) or is_hollow(right):
                return left.new_zeros((*left.shape[:-1], right.shape[-1]))
        return func(*args, **(kwargs or {}))
