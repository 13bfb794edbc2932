"""Logits whose vocabulary is divided over the workers of a tensor axis: each holds the columns of its own rows.

    head ─► DividedLogits ─► views, casts, shifts ─► cross_entropy      stays divided; see ``cross_entropy.py``
                          └─► any other operation                       on the logits of all workers, all-gathered

A tensor subclass with the shape of the whole logits, so that the code of any model or loss works on it unchanged.
Gathered values are replicated, so their gradient is too, and backward takes this worker's columns of it.
The operations that keep logits divided are listed in ``_POINTWISE`` and ``_VIEWS``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only

from stagewright import structure
from stagewright.engine.tensor.axis import TensorAxis
from stagewright.errors import UsageError

aten = torch.ops.aten
FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""Functions with an implementation for divided logits, which returns None where it needs them whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How the vocabulary of logits is divided."""

    axis: TensorAxis
    sizes: tuple[int, ...]
    """Columns of each worker."""
    dim: int
    """The dimension of the vocabulary."""

    @property
    def size(self) -> int:
        """Size of the whole vocabulary."""
        return sum(self.sizes)

    @property
    def held(self) -> int:
        """Columns of this worker."""
        return self.sizes[self.axis.index]

    @property
    def start(self) -> int:
        """First column of this worker."""
        return sum(self.sizes[: self.axis.index])

    def shard(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this worker's columns."""
        return whole.narrow(self.dim, self.start, self.held)


class DividedLogits(torch.Tensor):
    """A tensor of which this worker holds some columns, ``local``."""

    local: torch.Tensor
    division: Division
    _whole: torch.Tensor | None

    @staticmethod
    def __new__(cls, local: torch.Tensor, division: Division) -> Self:
        shape = list(local.shape)
        shape[division.dim] = division.size
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=_strides(local, shape), dtype=local.dtype, device=local.device
        )
        made.local, made.division, made._whole = local, division, None
        return made  # type: ignore[no-any-return]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DividedLogits({list(self.shape)}, columns from {self.division.start})"

    def to_local(self) -> torch.Tensor:
        """Return this worker's columns, differentiable."""
        return _ToLocal.apply(self)  # type: ignore[no-any-return, no-untyped-call]

    def to_whole(self) -> torch.Tensor:
        """Return the whole tensor, differentiable; every worker of the axis must call this."""
        return _Gather.apply(self)  # type: ignore[no-any-return, no-untyped-call]

    def whole(self) -> torch.Tensor:
        """All-gather the values, once."""
        if self._whole is None:
            division = self.division
            self._whole = division.axis.gather_shards(self.local, division.sizes, division.dim)
        return self._whole

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = FUNCTIONS[func](*args, **(kwargs or {})) if func in FUNCTIONS else None
            return func(*args, **(kwargs or {})) if result is None else result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _POINTWISE:
            result = _pointwise(func, args, kwargs)
        elif func in _VIEWS and isinstance(args[0], DividedLogits):
            result = _VIEWS[func](args[0], *args[1:], **kwargs)
        else:
            result = None
        if result is not None:
            return result
        changed = [value for value, argument in zip(args, func._schema.arguments, strict=False) if argument.is_write]
        if any(isinstance(value, DividedLogits) for value in changed):
            raise UsageError(
                f"the model changes its logits in place ({func}), which are divided with vocab_parallel = true: "
                "use vocab_parallel = false"
            )
        return func(
            *tree_map_only(DividedLogits, DividedLogits.whole, args),
            **tree_map_only(DividedLogits, DividedLogits.whole, kwargs),
        )


def divide(local: torch.Tensor, division: Division) -> torch.Tensor:
    """Return logits of which this worker holds the columns ``local``."""
    return _FromLocal.apply(local, division)  # type: ignore[no-any-return, no-untyped-call]


def gather_logits(values: Any) -> Any:
    """Return the values with all divided logits gathered; every worker of the axis must call this."""
    if not any(isinstance(leaf, DividedLogits) for leaf in structure.leaves(values)):
        return values
    return structure.map_tensors(lambda leaf: leaf.to_whole() if isinstance(leaf, DividedLogits) else leaf, values)


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, division: Division) -> DividedLogits:
        ctx.division = division
        return DividedLogits(local.detach(), division)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if isinstance(gradient, DividedLogits):
            return gradient.local, None
        return ctx.division.shard(gradient), None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: DividedLogits) -> torch.Tensor:
        ctx.division = logits.division
        return logits.local.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return DividedLogits(gradient, ctx.division)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: DividedLogits) -> torch.Tensor:
        return logits.whole().detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _strides(local: torch.Tensor, shape: Sequence[int]) -> list[int]:
    """Return the strides of a dense tensor whose dimensions are in the order of the local one's."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (local.stride(dim), -dim)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return strides


_POINTWISE = {
    aten._to_copy.default,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.neg.default,
    aten.tanh.default,
    aten.tanh_backward.default,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.ones_like.default,
    aten.zeros_like.default,
    aten.empty_like.default,
}
"""Operations on each element: scales, soft caps, casts and copies of logits."""


def _pointwise(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Apply an operation to this worker's columns; None if an operand is no part of the logits' shape."""
    operands = [value for value in args if isinstance(value, torch.Tensor)]
    divided = next(value for value in operands if isinstance(value, DividedLogits))
    division, shape = divided.division, divided.shape
    for value in operands:
        is_other = isinstance(value, DividedLogits) and (value.division != division or value.shape != shape)
        if is_other or not _broadcasts(value.shape, shape):
            return None

    def local(value: Any) -> Any:
        if isinstance(value, DividedLogits):
            return value.local
        if not isinstance(value, torch.Tensor):
            return value
        dim = division.dim - (len(shape) - value.dim())
        is_whole = dim >= 0 and value.shape[dim] == division.size
        return value.narrow(dim, division.start, division.held) if is_whole else value

    return DividedLogits(func(*[local(value) for value in args], **kwargs), division)


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Return whether a shape broadcasts to the target without changing that."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, wanted) for size, wanted in pairs)


def _redivided(logits: DividedLogits, local: torch.Tensor, dim: int) -> DividedLogits:
    old = logits.division
    return DividedLogits(local, Division(axis=old.axis, sizes=old.sizes, dim=dim))


def _view(logits: DividedLogits, shape: Sequence[int]) -> DividedLogits | None:
    """Change the shape of the dimensions before the vocabulary."""
    division = logits.division
    sizes = list(shape)
    if -1 in sizes:
        known = -torch.Size(sizes).numel()
        sizes[sizes.index(-1)] = logits.numel() // known if known else 0
    if division.dim != logits.dim() - 1 or not sizes or sizes[-1] != division.size:
        return None
    return _redivided(logits, logits.local.reshape(*sizes[:-1], division.held), len(sizes) - 1)


def _transpose(logits: DividedLogits, first: int, second: int) -> DividedLogits:
    order = list(range(logits.dim()))
    order[first], order[second] = order[second], order[first]
    return _permute(logits, order)


def _permute(logits: DividedLogits, dims: Sequence[int]) -> DividedLogits:
    dims = [dim % logits.dim() for dim in dims]
    return _redivided(logits, logits.local.permute(dims), dims.index(logits.division.dim))


def _slice(
    logits: DividedLogits, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> DividedLogits | None:
    dim %= logits.dim()
    if dim == logits.division.dim:
        return logits if (start or 0) == 0 and (end is None or end >= logits.division.size) and step == 1 else None
    return _redivided(logits, aten.slice.Tensor(logits.local, dim, start, end, step), logits.division.dim)


def _select(logits: DividedLogits, dim: int, index: int) -> DividedLogits | None:
    dim %= logits.dim()
    if dim == logits.division.dim:
        return None
    moved = logits.division.dim - (dim < logits.division.dim)
    return _redivided(logits, logits.local.select(dim, index), moved)


def _slice_backward(gradient: DividedLogits, shape: Sequence[int], dim: int, *place: int) -> DividedLogits | None:
    dim %= len(shape)
    if dim == gradient.division.dim:
        return None
    local = aten.slice_backward.default(gradient.local, _held(gradient, shape, gradient.division.dim), dim, *place)
    return _redivided(gradient, local, gradient.division.dim)


def _select_backward(gradient: DividedLogits, shape: Sequence[int], dim: int, index: int) -> DividedLogits:
    dim %= len(shape)
    vocabulary = gradient.division.dim + (dim <= gradient.division.dim)
    local = aten.select_backward.default(gradient.local, _held(gradient, shape, vocabulary), dim, index)
    return _redivided(gradient, local, vocabulary)


def _held(logits: DividedLogits, shape: Sequence[int], dim: int) -> list[int]:
    """Return a shape of whole logits with the columns of this worker."""
    return [logits.division.held if index == dim else size for index, size in enumerate(shape)]


def _unsqueeze(logits: DividedLogits, dim: int) -> DividedLogits:
    dim %= logits.dim() + 1
    return _redivided(logits, logits.local.unsqueeze(dim), logits.division.dim + (dim <= logits.division.dim))


def _squeeze(logits: DividedLogits, dim: int) -> DividedLogits | None:
    dim %= logits.dim()
    if dim == logits.division.dim:
        return None
    removed = logits.shape[dim] == 1 and dim < logits.division.dim
    return _redivided(logits, logits.local.squeeze(dim), logits.division.dim - removed)


_VIEWS: dict[Any, Callable[..., DividedLogits | None]] = {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten._reshape_alias.default: lambda logits, shape, _strides: _view(logits, shape),
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.t.default: lambda logits: _transpose(logits, 0, 1),
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_backward,
    aten.select.int: _select,
    aten.select_backward.default: _select_backward,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
}
"""Operations that leave the vocabulary as it is; each returns None where it does not."""
