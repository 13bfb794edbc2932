"""Floating-point operations of an operator from the shapes of its inputs, as the profiler records them."""

from __future__ import annotations

import math
from typing import TypeGuard

_ATTENTION = "aten::_scaled_dot_product_"
COUNTED_OPERATORS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", _ATTENTION)
"""How the names of operators begin whose FLOPs are counted."""


def operator_flops(name: str, dims: object) -> float:
    """Return the FLOPs of a matrix product or of attention; 0 for other operators, which are few in comparison.

    >>> operator_flops("aten::mm", [[2, 3], [3, 5]])
    60.0
    """
    if not isinstance(dims, list):
        return 0.0
    if name in ("aten::mm", "aten::bmm"):
        return _product(dims[:2])
    if name in ("aten::addmm", "aten::baddbmm"):
        return _product(dims[1:3])
    if name.startswith(_ATTENTION):
        return _attention(dims, is_backward="backward" in name)
    return 0.0


def _product(pair: list[object]) -> float:
    if len(pair) != 2 or not all(_is_shape(shape) and len(shape) >= 2 for shape in pair):
        return 0.0
    first, second = pair
    assert isinstance(first, list)
    assert isinstance(second, list)
    return 2.0 * math.prod(first) * int(second[-1])


def _attention(dims: list[object], *, is_backward: bool) -> float:
    """Count both matrix products of attention, and the five of its backward, without a causal mask's savings."""
    shapes = [shape for shape in dims if _is_shape(shape) and len(shape) == 4]
    query, key = (shapes[1:3] if is_backward else shapes[:2]) if len(shapes) >= 3 else (None, None)
    if query is None or key is None:
        return 0.0
    batch, heads, length, width = query
    return (10.0 if is_backward else 4.0) * batch * heads * length * key[2] * width


def _is_shape(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(size, int) and size >= 0 for size in value)
