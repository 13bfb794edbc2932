"""Sizes that depend on the batch, read from the symbolic shapes of ``torch.export``.

Capture makes only batch dimensions dynamic, so all size symbols stand for one number: the batch size. Unbacked symbols,
which torch creates for sizes that depend on tensor values (``u0``: the number of non-zero elements), are recognized
separately. The expression behind a ``SymInt`` (``node.expr``) and the kinds of symbols are private to torch and used in
this file only.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.utils._sympy.symbol import SymT, symbol_is_type

_UNBACKED = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)
_SAMPLE_BATCHES = (2, 3, 4, 11)


def is_constant(size: Any) -> bool:
    """Whether a size is the same for every batch."""
    return not isinstance(size, torch.SymInt) or not size.node.expr.free_symbols


def depends_only_on_batch(value: Any) -> bool:
    """Whether a value is a number (not a tensor) that the batch size alone determines."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return not any(symbol_is_type(symbol, _UNBACKED) for symbol in value.node.expr.free_symbols)
    return isinstance(value, int)


def has_known_shape(tensor: torch.Tensor) -> bool:
    """Whether the batch size alone determines a traced tensor's shape."""
    return all(depends_only_on_batch(size) for size in tensor.shape)


def size_at(size: Any, batch: int) -> int:
    """Evaluate a size for a batch of ``batch`` samples."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(_evaluate(size.node.expr, batch))


def evaluate_condition(condition: Any, batch: int) -> bool:
    """Evaluate a symbolic condition (an expression) for a batch of ``batch`` samples."""
    return bool(_evaluate(condition, batch))


@lru_cache(maxsize=1 << 16)
def _evaluate(expression: Any, batch: int) -> Any:
    """Evaluate an expression; cached, because every P2P transfer of every step needs it."""
    return expression.subs(dict.fromkeys(expression.free_symbols, batch))


def as_linear(size: Any) -> tuple[int, int] | None:
    """Return ``(slope, constant)`` with size = slope · batch + constant, or ``None`` if the size is not linear."""
    if isinstance(size, int):
        return 0, size
    if not isinstance(size, torch.SymInt) or not depends_only_on_batch(size):
        return None
    sizes = [size_at(size, batch) for batch in _SAMPLE_BATCHES]
    slope = sizes[1] - sizes[0]
    constant = sizes[0] - 2 * slope
    is_linear = all(value == slope * batch + constant for value, batch in zip(sizes, _SAMPLE_BATCHES, strict=True))
    return (slope, constant) if is_linear else None


def shape_at(tensor: torch.Tensor, batch: int) -> tuple[int, ...]:
    """Return the shape of a traced tensor at a batch size."""
    return tuple(size_at(size, batch) for size in tensor.shape)


def memory_order(value: Any) -> tuple[int, ...] | None:
    """Return the dimensions of a traced tensor, outermost in memory first; None if it is contiguous or has gaps."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not has_known_shape(value):
        return None
    shape = shape_at(value, _SAMPLE_BATCHES[-1])
    strides = [size_at(stride, _SAMPLE_BATCHES[-1]) for stride in value.stride()]
    order = tuple(sorted(range(len(shape)), key=lambda dim: -strides[dim]))
    dense, expected = True, 1
    for dim in reversed(order):
        dense &= shape[dim] == 1 or strides[dim] == expected
        expected *= shape[dim]
    return order if dense and order != tuple(range(len(shape))) else None


def batch_dim(tensor: torch.Tensor) -> int | None:
    """Return the first dimension from which the batch size can be computed."""
    for dim, size in enumerate(tensor.shape):
        line = as_linear(size)
        if line is not None and line[0] != 0:
            return dim
    return None


def num_bytes(tensor: torch.Tensor, batch: int) -> int:
    """Return the bytes of a traced tensor, as a contiguous copy, at a batch size."""
    total = tensor.dtype.itemsize
    for size in shape_at(tensor, batch):
        total *= size
    return total
