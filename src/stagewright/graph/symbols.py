"""Sizes that depend on the batch, read from export's symbolic shapes.

Every dynamic dimension that capture asks for is the batch's, so all symbols of sizes stand for one number. Symbols that
torch makes up for sizes that depend on values (``u0``: how many elements are not zero) are told apart. The expression
behind a ``SymInt`` (``node.expr``) and the kinds of symbols are private to torch and read in this file only.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.utils._sympy.symbol import SymT, symbol_is_type

__all__ = [
    "answer_at",
    "batch_dim",
    "follows_from_batch",
    "has_known_shape",
    "is_fixed",
    "linear",
    "num_bytes",
    "shape_at",
    "size_at",
]

_FROM_VALUES = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)


def is_fixed(size: Any) -> bool:
    """Whether a size is the same for every batch."""
    return not isinstance(size, torch.SymInt) or not size.node.expr.free_symbols


def follows_from_batch(value: Any) -> bool:
    """Whether a number (not a tensor) depends on the batch size and on no values."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return not any(symbol_is_type(symbol, _FROM_VALUES) for symbol in value.node.expr.free_symbols)
    return isinstance(value, int)


def has_known_shape(tensor: torch.Tensor) -> bool:
    """Whether a traced tensor's shape depends on the batch size alone."""
    return all(follows_from_batch(size) for size in tensor.shape)


def size_at(size: Any, batch: int) -> int:
    """The value of one size when the batch has ``batch`` samples."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(_at(size.node.expr, batch))


def answer_at(condition: Any, batch: int) -> bool:
    """The truth of a symbolic condition (an expression) when the batch has ``batch`` samples."""
    return bool(_at(condition, batch))


@lru_cache(maxsize=1 << 16)
def _at(expression: Any, batch: int) -> Any:
    """An expression's value; remembered, for every message of every step asks again."""
    return expression.subs(dict.fromkeys(expression.free_symbols, batch))


def linear(size: Any) -> tuple[int, int] | None:
    """``(slope, constant)`` with size = slope · batch + constant, or ``None`` if it is not linear."""
    if isinstance(size, int):
        return 0, size
    if not isinstance(size, torch.SymInt) or not follows_from_batch(size):
        return None
    at = [size_at(size, batch) for batch in (2, 3, 4, 11)]
    slope = at[1] - at[0]
    constant = at[0] - 2 * slope
    straight = all(value == slope * batch + constant for value, batch in zip(at, (2, 3, 4, 11), strict=True))
    return (slope, constant) if straight else None


def shape_at(tensor: torch.Tensor, batch: int) -> tuple[int, ...]:
    """The shape of a traced tensor at a batch size."""
    return tuple(size_at(size, batch) for size in tensor.shape)


def batch_dim(tensor: torch.Tensor) -> int | None:
    """The first dimension from which the batch size can be read back."""
    for dim, size in enumerate(tensor.shape):
        line = linear(size)
        if line is not None and line[0] != 0:
            return dim
    return None


def num_bytes(tensor: torch.Tensor, batch: int) -> int:
    """Bytes of a traced tensor, sent contiguous, at a batch size."""
    total = tensor.dtype.itemsize
    for size in shape_at(tensor, batch):
        total *= size
    return total
