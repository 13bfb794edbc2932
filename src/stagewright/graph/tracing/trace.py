"""Trace the glue between units with ``torch.export``, each unit being one opaque operator.

While export traces, a unit's call is answered by a stand-in: it flattens its arguments and calls

    stagewright::unit(int call, Tensor[] tensors, SymInt[] sizes) -> Tensor[]

whose fake kernel knows the outputs' shapes from the observed runs and nothing else. So the code inside units is never
traced: control flow, dropout, batch norm and caches in there stay as they are. What export returns is a graph with
lifted parameters; ``assemble.py`` puts the units back into it.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from stagewright.errors import CaptureError
from stagewright.graph.tracing.intercept import intercepted
from stagewright.graph.tracing.library_patches import collect, export_quirks
from stagewright.graph.tracing.observe import CallForm, TensorForm
from stagewright.graph.tracing.untraceable import Branch, watched_trace

__all__ = ["UNIT_OPERATOR", "Trace", "TracedCall", "holds_tensor", "trace"]

_library = torch.library.Library("stagewright", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("unit(int call, Tensor[] tensors, SymInt[] sizes) -> Tensor[]")  # type: ignore[no-untyped-call]
UNIT_OPERATOR = torch.ops.stagewright.unit.default
torch.fx.node.has_side_effect(UNIT_OPERATOR)  # a unit whose result nobody uses still counts batches and draws numbers

_PLAIN = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(slots=True, kw_only=True)
class TracedCall:
    """How the arguments of one unit call are put together from the operator's two lists."""

    form: CallForm
    """The observed form of the call."""
    in_spec: Any
    """Structure of ``(args, kwargs)`` while tracing."""
    leaves: list[tuple[str, Any]]
    """Per leaf: ``("tensor", i)``, ``("size", i)`` or ``("constant", object)``."""
    absent: frozenset[int]
    """Leaves that were ``None`` in the eager runs but a tensor while tracing."""


@dataclass(slots=True, kw_only=True)
class Trace:
    """An exported program whose units are opaque."""

    program: torch.export.ExportedProgram
    calls: list[TracedCall]
    """Indexed by the operator's first argument."""
    branches: list[Branch]
    """Questions about the batch size that the model's own code asked."""


@dataclass(slots=True)
class _Tracing:
    """What the fake kernel and the stand-ins share while export runs."""

    outputs: list[tuple[CallForm, CallForm | None]] = field(default_factory=list)
    sizes: tuple[int, int] = (1, 2)


_current: list[_Tracing] = []


@torch.library.register_fake("stagewright::unit")  # type: ignore[untyped-decorator]
def _fake_unit(call: int, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[torch.Tensor]:
    """Outputs of the observed shapes; the first size is the batch's."""
    tracing = _current[-1]
    first, second = tracing.outputs[call]
    results = []
    for at, form in enumerate(first.out_leaves):
        if isinstance(form, TensorForm):
            other = second.out_leaves[at] if second is not None else form
            results.append(_empty(form, other, tracing.sizes, sizes[0], first))
    return results


def _empty(form: TensorForm, other: TensorForm, seen: tuple[int, int], batch: Any, call: CallForm) -> torch.Tensor:
    """A tensor of the observed shape and memory order, with the batch's size put in."""
    shape = []
    for first, second in zip(form.shape, other.shape, strict=True):
        slope, rest = divmod(second - first, seen[1] - seen[0])
        if rest:
            raise CaptureError(
                f"unit {call.name!r} gives a dimension of {first} for a batch of {seen[0]} but {second} for {seen[1]}: "
                "its size depends on the data, not on the batch"
            )
        shape.append(first + slope * (batch - seen[0]) if slope else first)
    order = sorted(range(len(shape)), key=lambda dim: -form.stride[dim])
    repeated = [form.stride[dim] == 0 and form.shape[dim] > 1 for dim in range(len(shape))]
    dense = torch.empty([1 if repeated[dim] else shape[dim] for dim in order], dtype=form.dtype, device=form.device)
    back = dense.permute([order.index(dim) for dim in range(len(shape))])
    return back.expand(shape) if any(repeated) else back


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    calls: Sequence[CallForm],
    other_calls: Sequence[CallForm] | None,
    names: dict[str, nn.Module],
    batch_sizes: tuple[int, int],
    batch_of: Callable[[list[Any]], Any],
    dynamic_shapes: Any,
    packed: bool,
) -> Trace:
    """Export the model on ``args`` and ``kwargs`` with the given unit calls opaque.

    ``other_calls`` are the same calls at the second batch size (``None``: the batch size is fixed); ``batch_of`` finds
    the batch's size in the flattened inputs; ``packed`` tells whether the example held packed sequences.
    """
    tracing = _Tracing(sizes=batch_sizes)
    tracing.outputs = [(call, other_calls[at] if other_calls else None) for at, call in enumerate(calls)]
    expected: dict[str, list[int]] = {}
    for at, call in enumerate(calls):
        expected.setdefault(call.name, []).append(at)
    traced: dict[int, TracedCall] = {}
    batch: list[Any] = [batch_sizes[0]]

    def make_stub(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        numbers = iter(expected[name])

        def stub(*call_args: Any, **call_kwargs: Any) -> Any:
            number = next(numbers, None)
            if number is None:
                raise CaptureError(
                    f"module {name!r} is called more often while tracing than the {len(expected[name])} times "
                    "of a plain run"
                )
            call, tensors, sizes = _flatten_call(calls[number], call_args, call_kwargs)
            traced[number] = call
            results = iter(UNIT_OPERATOR(number, tensors, [batch[0], *sizes]))
            form = calls[number]
            leaves = [next(results) if isinstance(leaf, TensorForm) else leaf for leaf in form.out_leaves]
            output = pytree.tree_unflatten(leaves, form.out_spec)
            collect(names[name], call_args, output)
            return output

        return lambda original: stub

    class Root(nn.Module):
        """Notes the batch's symbol, then runs the model."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            batch[0] = batch_of(pytree.tree_leaves((args, kwargs)))
            with _assignments_as_writes(self.model):
                return self.model(*args, **kwargs)

    stand_ins = {names[name]: make_stub(name) for name in expected}
    with _tracing(tracing), export_quirks(model, packed), intercepted(stand_ins), _silence(), watched_trace() as seen:
        program = torch.export.export(Root(), (args, kwargs), dynamic_shapes=dynamic_shapes, strict=False)
    missing = [calls[at].name for at in range(len(calls)) if at not in traced]
    if missing:
        raise CaptureError(f"module {missing[0]!r} is called in a plain run but not while tracing")
    return Trace(program=program, calls=[traced[at] for at in range(len(calls))], branches=seen)


def _flatten_call(
    form: CallForm, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[TracedCall, list[torch.Tensor], list[Any]]:
    """Sort the leaves of a call's arguments into tensors, sizes and constants."""
    flat, in_spec = pytree.tree_flatten((args, kwargs))
    tensors: list[torch.Tensor] = []
    sizes: list[Any] = []
    leaves: list[tuple[str, Any]] = []
    absent: set[int] = set()
    same = len(flat) == len(form.in_leaves)
    for at, leaf in enumerate(flat):
        if isinstance(leaf, torch.Tensor):
            if same and form.in_leaves[at] is None:
                absent.add(at)
            leaves.append(("tensor", len(tensors)))
            tensors.append(leaf)
        elif isinstance(leaf, torch.SymInt):
            sizes.append(leaf)
            leaves.append(("size", len(sizes)))  # size 0 is the batch's
        else:
            _check_constant(form, leaf)
            leaves.append(("constant", leaf))
    call = TracedCall(form=form, in_spec=in_spec, leaves=leaves, absent=frozenset(absent))
    return call, tensors, sizes


def _check_constant(form: CallForm, leaf: Any) -> None:
    """An object that hides tensors can't be baked into a graph."""
    if isinstance(leaf, _PLAIN):
        return
    held = [name for name, value in getattr(leaf, "__dict__", {}).items() if holds_tensor(value)]
    if held or isinstance(leaf, (torch.SymFloat, torch.SymBool)):
        what = f" with tensors in {held[0]!r}" if held else ""
        raise CaptureError(
            f"unit {form.name!r} is given a {type(leaf).__name__}{what}, an object that can't travel between stages"
        )


def holds_tensor(value: Any) -> bool:
    """Whether an object has tensors in it, also one that pytree does not look into."""
    leaves = pytree.tree_leaves(value)
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves) or any(
        isinstance(inner, torch.Tensor) for leaf in leaves for inner in getattr(leaf, "__dict__", {}).values()
    )


@contextmanager
def _assignments_as_writes(model: nn.Module) -> Iterator[None]:
    """Trace ``self.count = self.count + 1`` as a write into that buffer, as export does for the root's buffers only."""
    before = [(module, dict(module._buffers)) for module in model.modules()]
    yield
    for module, buffers in before:
        for name, buffer in buffers.items():
            now = module._buffers.get(name)
            if buffer is not None and now is not None and now is not buffer:
                with torch.no_grad():
                    buffer.copy_(now)
                module._buffers[name] = buffer


@contextmanager
def _silence() -> Iterator[None]:
    """Keep torch's warnings and dumps of half-made graphs to itself: what matters comes as one error."""
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"]
    loggers = [logger for logger in map(logging.getLogger, names) if not logger.disabled]
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.disabled = True
            yield
        finally:
            for logger in loggers:
                logger.disabled = False


@contextmanager
def _tracing(state: _Tracing) -> Iterator[None]:
    _current.append(state)
    try:
        yield
    finally:
        _current.pop()
