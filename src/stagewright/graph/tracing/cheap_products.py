"""Replace matrix products and convolutions by cheap functions of their operands.

A graph is compared with its model at a batch size that was not observed, to find code between units that depends on
the batch size. Both run the same units, whose products take almost all of the time of a large model. In that comparison
they need not be computed: it is enough that both runs replace them by the same function, which passes samples, rows and
positions on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_SUMS = (_aten.addmm.default, _aten.baddbmm.default)
"""Products with a third operand, the first, which is added."""
_PRODUCTS = (_aten.mm.default, _aten.bmm.default, *_SUMS)


_MIN_MACS = 1_000_000_000
"""Below it the products take less time than replacing them."""


@contextmanager
def cheap_products(*, macs: int) -> Iterator[None]:
    """Replace the floating-point products of the code inside, if it has many multiply-accumulates."""
    if macs < _MIN_MACS:
        yield
        return
    with _CheapProducts():  # type: ignore[no-untyped-call]
        yield


class _CheapProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes an output column of a product from one input column, a position of a convolution from one position."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and args[-1].is_floating_point() and args[-1].numel():
            return _product(args[-2], args[-1], args[0] if func in _SUMS else None)
        if func is _aten.convolution.default and args[0].is_floating_point():
            return _convolution(*args)
        return func(*args, **(kwargs or {}))


def _product(left: torch.Tensor, right: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
    """Return column j of the left factor (repeated as needed), plus the mean of column j of the right one."""
    columns = right.mean(-2, keepdim=True)
    return _resized(left, -1, right.shape[-1]) + (columns if added is None else columns + added)


def _convolution(signal: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Any) -> torch.Tensor:
    """Return the signal, sampled at as many channels and positions as the result has."""
    on_meta = (None if tensor is None else tensor.to("meta") for tensor in (signal, weight, bias))
    shape = _aten.convolution.default(*on_meta, *options)
    sampled = _resized(signal, 1, shape.shape[1])
    for dim in range(2, signal.ndim):
        size, wanted = signal.shape[dim], shape.shape[dim]
        if size > wanted > 0:
            sampled = sampled[(slice(None),) * dim + (slice(None, None, size // wanted),)]
        sampled = _resized(sampled, dim, wanted)
    offset = weight.mean()
    if bias is not None:
        offset = offset + bias.view(-1, *[1] * (signal.ndim - 2))
    result = torch.empty_strided(shape.shape, shape.stride(), dtype=signal.dtype, device=signal.device)
    return torch.add(sampled, offset, out=result)


def _resized(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return the first ``size`` elements along a dimension, as a view; repeat the tensor if there are fewer."""
    if size > tensor.shape[dim]:
        tensor = torch.cat([tensor] * -(-size // tensor.shape[dim]), dim)
    return tensor.narrow(dim, 0, size)
