"""Trace the glue operations between units with ``torch.export``; each unit is one opaque operator.

While export traces, each call of a unit is intercepted: the replacement flattens the arguments and calls

    stagewright::unit(int call, Tensor[] tensors, SymInt[] sizes) -> Tensor[]

whose fake kernel knows only the output shapes of the observed runs. So the code inside units is never traced: control
flow, dropout, batch norm and caches in units stay unchanged. Export returns a graph with lifted parameters;
``assemble.py`` puts the units back into it.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stagewright import structure
from stagewright.errors import CaptureError
from stagewright.graph.tracing.export_patches import patch_for_export, run_collecting_hooks
from stagewright.graph.tracing.guards import BatchSizeGuard, collect_guards
from stagewright.graph.tracing.hidden_state import HiddenState
from stagewright.graph.tracing.intercept import intercept_calls
from stagewright.graph.tracing.observation import CallSpec, TensorSpec
from stagewright.graph.tracing.packed_sequences import padded_sequences
from stagewright.structure import Structure

_library = torch.library.Library("stagewright", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("unit(int call, Tensor[] tensors, SymInt[] sizes) -> Tensor[]")  # type: ignore[no-untyped-call]
UNIT_OPERATOR = torch.ops.stagewright.unit.default
torch.fx.node.has_side_effect(
    UNIT_OPERATOR
)  # a unit with an unused result still updates buffers and draws random numbers

_TRACED = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_EXPORTED = (torch.Tensor, int, float, bool, str, type(None))
"""Inputs that ``torch.export`` takes; any other is a constant of the trace."""


@dataclass(slots=True, kw_only=True)
class TracedCall:
    """How to rebuild the arguments of one unit call from the operator's two lists."""

    spec: CallSpec
    """The call as observed in the eager run."""
    in_spec: Structure
    """Structure of ``(args, kwargs)`` while tracing."""
    leaves: list[tuple[str, Any]]
    """For each leaf: ``("tensor", i)``, ``("number", i)``, ``("size", i)`` or ``("constant", object)``."""
    absent: frozenset[int]
    """Leaves that were ``None`` in the eager runs but are a tensor in the trace."""


@dataclass(slots=True, kw_only=True)
class Trace:
    """An exported program with opaque units."""

    program: torch.export.ExportedProgram
    calls: list[TracedCall]
    """Indexed by the operator's first argument."""
    guards: list[BatchSizeGuard]
    """Conditions on the batch size on which the model branches."""
    specialized: frozenset[str]
    """Modules whose code fixed the batch size."""
    padded: bool
    """Whether packed sequences between units are padded."""
    inputs: list[Any]
    """The leaves of the model's arguments; the program has a placeholder for each."""
    in_spec: Structure
    """Structure of the model's ``(args, kwargs)``."""
    outputs: list[tuple[str, Any]]
    """For each leaf of the model's result: ``("traced", i)`` or ``("constant", object)``."""
    out_spec: Structure
    """Structure of the model's result."""


@dataclass(slots=True)
class _Tracing:
    """State that the fake kernel and the intercepted calls share while export runs."""

    outputs: list[tuple[CallSpec, CallSpec | None]] = field(default_factory=list)
    sizes: tuple[int, int] = (1, 2)


_current: list[_Tracing] = []


@torch.library.register_fake("stagewright::unit")  # type: ignore[untyped-decorator]
def _fake_unit(call: int, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[torch.Tensor]:
    """Return empty outputs of the observed shapes; the first size is the batch size."""
    tracing = _current[-1]
    first, second = tracing.outputs[call]
    results = []
    for index, spec in enumerate(first.out_leaves):
        if isinstance(spec, TensorSpec):
            resized = second.out_leaves[index] if second is not None else spec
            results.append(_empty(spec, resized, tracing.sizes, sizes[0], first))
        elif index in first.varying:
            results.append(torch.empty((), dtype=number_dtype(spec)))
    return results


def number_dtype(number: float) -> torch.dtype:
    """Return the dtype of the tensor that carries a number between units without loss."""
    return torch.bool if isinstance(number, bool) else torch.int64 if isinstance(number, int) else torch.float64


def _empty(
    spec: TensorSpec, resized: TensorSpec, observed: tuple[int, int], batch: Any, call: CallSpec
) -> torch.Tensor:
    """Return an empty tensor of the observed shape and memory order at the symbolic batch size."""
    shape = []
    for first, second in zip(spec.shape, resized.shape, strict=True):
        slope, remainder = divmod(second - first, observed[1] - observed[0])
        if remainder:
            raise CaptureError(
                f"unit {call.name!r} returns a dimension of {first} for a batch of {observed[0]} but {second} for "
                f"{observed[1]}: its size depends on the data, not on the batch size"
            )
        shape.append(first + slope * (batch - observed[0]) if slope else first)
    order = sorted(range(len(shape)), key=lambda dim: -spec.stride[dim])
    expanded = [spec.stride[dim] == 0 and spec.shape[dim] > 1 for dim in range(len(shape))]
    dense = torch.empty([1 if expanded[dim] else shape[dim] for dim in order], dtype=spec.dtype, device=spec.device)
    ordered = dense.permute([order.index(dim) for dim in range(len(shape))])
    return ordered.expand(shape) if any(expanded) else ordered


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    calls: Sequence[CallSpec],
    other_calls: Sequence[CallSpec] | None,
    names: dict[str, nn.Module],
    batch_sizes: tuple[int, int],
    batch_of: Callable[[list[Any]], Any],
    dynamic_shapes: Any,
    packed: bool,
    hidden: HiddenState,
    padded: bool,
) -> Trace:
    """Export the model on ``args`` and ``kwargs`` with the given unit calls opaque.

    ``other_calls`` are the same calls at the second batch size (``None``: the batch size is fixed); ``batch_of`` reads
    the batch size from the flattened inputs; ``packed`` says whether the example contains packed sequences. While the
    model runs, reads of ``hidden`` parameters are detected. With ``padded``, each ``PackedSequence`` is padded.
    """
    tracing = _Tracing(sizes=batch_sizes)
    tracing.outputs = [(call, other_calls[index] if other_calls else None) for index, call in enumerate(calls)]
    expected: dict[str, list[int]] = {}
    for index, call in enumerate(calls):
        expected.setdefault(call.name, []).append(index)
    traced: dict[int, TracedCall] = {}
    batch: list[Any] = [batch_sizes[0]]
    inputs, in_spec = structure.flatten((args, kwargs))
    outputs: list[tuple[str, Any]] = []
    out_specs: list[Structure] = []

    def make_stub(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        indices = iter(expected[name])

        def stub(*call_args: Any, **call_kwargs: Any) -> Any:
            index = next(indices, None)
            if index is None:
                raise CaptureError(
                    f"module {name!r} is called more often in the trace than the {len(expected[name])} times of an "
                    "eager run"
                )
            spec = calls[index]
            traced[index], tensors, sizes = _flatten_call(spec, call_args, call_kwargs)
            results = iter(UNIT_OPERATOR(index, tensors, [batch[0], *sizes]))
            leaves: list[Any] = []
            for position, leaf in enumerate(spec.out_leaves):
                if isinstance(leaf, TensorSpec):
                    leaves.append(next(results))
                else:
                    leaves.append(next(results).item() if position in spec.varying else leaf)
            output = spec.out_spec.unflatten(leaves)
            run_collecting_hooks(names[name], call_args, output)
            return output

        return lambda original: stub

    class Root(nn.Module):
        """The model, with the symbol of the batch size recorded before it runs."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, leaves: list[Any]) -> list[Any]:
            batch[0] = batch_of(leaves)
            pairs = zip(leaves, inputs, strict=True)
            args, kwargs = in_spec.unflatten([leaf if isinstance(value, _EXPORTED) else value for leaf, value in pairs])
            with _assignments_as_writes(self.model), hidden.running():
                result = self.model(*args, **kwargs)
            result_leaves, out_spec = structure.flatten(result)
            _check_result(model, result_leaves)
            traced_leaves = [leaf for leaf in result_leaves if isinstance(leaf, _TRACED)]
            positions = iter(range(len(traced_leaves)))
            outputs[:] = [
                ("traced", next(positions)) if isinstance(leaf, _TRACED) else ("constant", leaf)
                for leaf in result_leaves
            ]
            out_specs[:] = [out_spec]
            return traced_leaves

    stubs = {names[name]: make_stub(name) for name in expected}
    with (
        _tracing(tracing),
        patch_for_export(model, packed),
        padded_sequences(checked=True) if padded else nullcontext(),
        intercept_calls(stubs),
        _silence(),
        collect_guards() as guards,
    ):
        exported = [leaf if isinstance(leaf, _EXPORTED) else None for leaf in inputs]
        shapes = None if dynamic_shapes is None else (list(dynamic_shapes),)
        program = torch.export.export(Root(), (exported,), dynamic_shapes=shapes, strict=False)
    missing = next((call.name for index, call in enumerate(calls) if index not in traced), None)
    if missing is not None:
        raise CaptureError(f"module {missing!r} is called in an eager run but not in the trace")
    return Trace(
        program=program,
        calls=[traced[index] for index in range(len(calls))],
        guards=guards.branches,
        specialized=frozenset(
            name for name, module in model.named_modules() if any(module is other for other in guards.specialized)
        ),
        padded=padded,
        inputs=inputs,
        in_spec=in_spec,
        outputs=outputs,
        out_spec=out_specs[0],
    )


def _flatten_call(
    spec: CallSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[TracedCall, list[torch.Tensor], list[Any]]:
    """Sort the leaves of a call's arguments into tensors, sizes and constants."""
    flat, in_spec = structure.flatten((args, kwargs))
    tensors: list[torch.Tensor] = []
    sizes: list[Any] = []
    leaves: list[tuple[str, Any]] = []
    absent: set[int] = set()
    is_aligned = len(flat) == len(spec.in_leaves)
    for index, leaf in enumerate(flat):
        if isinstance(leaf, torch.Tensor):
            if is_aligned and spec.in_leaves[index] is None:
                absent.add(index)
            leaves.append(("tensor", len(tensors)))
            tensors.append(leaf)
        elif isinstance(leaf, torch.SymInt):
            sizes.append(leaf)
            leaves.append(("size", len(sizes)))  # size 0 is the batch size
        elif isinstance(leaf, (torch.SymFloat, torch.SymBool)):
            leaves.append(("number", len(tensors)))
            is_float = isinstance(leaf, torch.SymFloat)
            number: Any = leaf if is_float else torch.sym_ite(leaf, 1, 0)  # type: ignore[no-untyped-call]
            tensors.append(torch.scalar_tensor(number, dtype=torch.float64 if is_float else torch.bool))
        else:
            _check_constant(spec, leaf)
            leaves.append(("constant", leaf))
    call = TracedCall(spec=spec, in_spec=in_spec, leaves=leaves, absent=frozenset(absent))
    return call, tensors, sizes


def _check_constant(spec: CallSpec, leaf: Any) -> None:
    """Reject an object that contains tensors but can't be taken apart: it can't be a constant of the graph."""
    path = structure.find_tensor(leaf)
    if isinstance(leaf, nn.Module) and next(leaf.parameters(), None) is None:
        return  # a table or a function; each stage that needs it holds it
    if path is not None:
        raise CaptureError(
            f"unit {spec.name!r} is given a {type(leaf).__name__} with a tensor in {path!r}, an object that can't be "
            "sent between stages"
        )


def _check_result(model: nn.Module, leaves: Sequence[Any]) -> None:
    for leaf in leaves:
        path = None if isinstance(leaf, _TRACED) else structure.find_tensor(leaf)
        if path is not None:
            raise CaptureError(
                f"{type(model).__name__} returns a {type(leaf).__name__} with a tensor in {path!r}, an object that "
                "can't be taken apart; return a tuple, a dictionary or a dataclass"
            )


@contextmanager
def _assignments_as_writes(model: nn.Module) -> Iterator[None]:
    """Trace ``self.count = self.count + 1`` as a write to that buffer; export does this for the root's buffers only."""
    before = [(module, dict(module._buffers)) for module in model.modules()]
    yield
    for module, buffers in before:
        for name, buffer in buffers.items():
            current = module._buffers.get(name)
            if buffer is not None and current is not None and current is not buffer:
                with torch.no_grad():
                    buffer.copy_(current)
                module._buffers[name] = buffer


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress torch's warnings and dumps of partial graphs; failures are reported as one error."""
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
