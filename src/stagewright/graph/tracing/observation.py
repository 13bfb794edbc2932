"""Observe an eager run of a model: which submodules are called, with which inputs and results, at what cost.

The model runs eagerly on the example batch and on a second batch of another size. Only the specification of each call
is recorded (structure, shapes, strides, aliases and in-place changes of inputs), never the tensors. A size that differs
between the two runs is a linear function of the batch size; every other size is constant.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from stagewright import structure
from stagewright.graph.macs import MacCounter
from stagewright.graph.tracing.export_patches import count_collected, detect_packing
from stagewright.graph.tracing.guards import detect_tensor_hooks
from stagewright.graph.tracing.intercept import can_intercept, intercept_calls
from stagewright.graph.tracing.packed_sequences import (
    call_packed,
    detect_packed_sequences,
    is_recurrent,
    padded_sequences,
)
from stagewright.sequence_layers import batch_and_steps
from stagewright.structure import Structure


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor's metadata."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True, kw_only=True)
class CallSpec:
    """The specification of one call of a module."""

    name: str
    """Qualified name of the module."""
    nth: int
    """0 for the first call of this module, 1 for its second, …"""
    parent: int | None
    """Index of the enclosing call."""
    macs: int = 0
    """Multiply-accumulates of the call, including its children."""
    num_collected: int = 0
    """Number of values that hooks collected during the call."""
    in_spec: Structure = field(default_factory=Structure)
    """Structure of ``(args, kwargs)``."""
    in_leaves: list[Any] = field(default_factory=list)
    """Leaves of ``(args, kwargs)``: a TensorSpec for a tensor, otherwise the object itself."""
    out_spec: Structure = field(default_factory=Structure)
    """Structure of the result."""
    out_leaves: list[Any] = field(default_factory=list)
    """Leaves of the result, like ``in_leaves``."""
    varying: frozenset[int] = frozenset()
    """Indices of output leaves that are numbers and differ from call to call."""
    mutated: frozenset[int] = frozenset()
    """Indices of the input leaves that the call changed in place."""
    replaced: str = ""
    """The first object in the arguments that the call changed (a cache that it filled); empty if none."""
    aliases: dict[int, int] = field(default_factory=dict)
    """Index of an output leaf → index of the input leaf that shares its storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """All calls of one eager run, in the order in which they began."""

    calls: list[CallSpec]
    """The call of the root comes first."""
    macs: int
    """Multiply-accumulates of the whole run."""
    packed: bool
    """Whether the model found several sequences packed into one sample."""
    packs_sequences: bool
    """Whether the model calls ``pack_padded_sequence``."""
    side_effects: dict[str, str]
    """Modules whose forward has a side effect that a graph would lose, with a description of it."""


def observe(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, padded: bool = False) -> Observation:
    """Run the model once on copies of the inputs and record the specification of every call.

    ``padded``: keep packed sequences padded, so that their shapes don't depend on the data.
    """
    calls: list[CallSpec] = []
    stack: list[int] = []
    num_calls: Counter[str] = Counter()
    modules = {module: name for name, module in model.named_modules() if can_intercept(module)}
    states = {name: _tensor_attributes(module) for module, name in modules.items()}
    side_effects: dict[str, str] = {}
    generator_state = _generator_state()

    def check_generators() -> None:
        """Record a side effect of the innermost call if Python's or numpy's generator advanced since the last check."""
        nonlocal generator_state
        current = _generator_state()
        if current != generator_state and stack:
            side_effects[calls[stack[-1]].name] = "draws random numbers from Python or numpy"
        generator_state = current

    def make_recorder(module: nn.Module, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        has_own_code = not _is_torch_layer(module)

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            if padded and is_recurrent(module):
                original = call_packed(original)

            def recorder(*call_args: Any, **call_kwargs: Any) -> Any:
                call = CallSpec(name=name, nth=num_calls[name], parent=stack[-1] if stack else None)
                num_calls[name] += 1
                if has_own_code:
                    check_generators()
                if call.parent is not None and not _same_objects(states[name], _tensor_attributes(module)):
                    side_effects[calls[call.parent].name] = f"sets attributes of {name}"
                numbers = _number_attributes(module)
                stack.append(len(calls))
                calls.append(call)
                leaves, call.in_spec = structure.flatten((call_args, call_kwargs))
                call.in_leaves = [_spec(leaf) for leaf in leaves]
                versions = {index: leaf._version for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
                macs_before, collected_before = counter.total, count_collected()
                try:
                    result = original(*call_args, **call_kwargs)
                finally:
                    if has_own_code:
                        check_generators()
                    stack.pop()
                    states[name] = _tensor_attributes(module)
                changed = [key for key, value in _number_attributes(module).items() if numbers.get(key, value) != value]
                if changed:
                    side_effects.setdefault(name, f"changes its attribute {changed[0]!r}")
                call.macs = counter.total - macs_before
                call.num_collected = count_collected() - collected_before
                call.mutated = frozenset(
                    index for index, version in versions.items() if leaves[index]._version != version
                )
                call.replaced = _changed_object(call_args, call_kwargs, leaves, call.in_spec)
                results, call.out_spec = structure.flatten(result, records=True)
                call.out_leaves = [_spec(leaf) for leaf in results]
                call.aliases = _aliases(leaves, results)
                return result

            return recorder

        return make

    recorders = {module: make_recorder(module, name) for module, name in modules.items()}
    with torch.inference_mode(False):
        args, kwargs = structure.map_tensors(lambda tensor: tensor.detach().clone(), (args, kwargs))

    def note_hook() -> None:
        if stack:
            side_effects[calls[stack[-1]].name] = "registers a hook on a tensor"

    with ExitStack() as context:
        context.enter_context(torch.inference_mode(False))
        context.enter_context(torch.enable_grad())  # for code such as `if x.requires_grad: x.register_hook(…)`
        context.enter_context(detect_tensor_hooks(note_hook))
        counter = context.enter_context(MacCounter())
        packing = context.enter_context(detect_packing())
        packs = context.enter_context(padded_sequences(checked=False) if padded else detect_packed_sequences())
        context.enter_context(intercept_calls(recorders))
        model(*args, **kwargs)
    return Observation(
        calls=calls, macs=counter.total, packed=any(packing), packs_sequences=bool(packs), side_effects=side_effects
    )


def same_calls(first: Observation, second: Observation) -> bool:
    """Whether two runs made the same calls with results of the same structure."""

    def signature(call: CallSpec) -> tuple[Any, ...]:
        kinds = tuple(isinstance(leaf, TensorSpec) for leaf in call.out_leaves)
        ranks = tuple(len(leaf.shape) for leaf in call.out_leaves if isinstance(leaf, TensorSpec))
        return call.name, call.out_spec, kinds, ranks

    return [signature(call) for call in first.calls] == [signature(call) for call in second.calls]


def _changed_object(args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], spec: Structure) -> str:
    """Name the first object in the arguments that has changed since they were flattened; empty if none has."""
    path = structure.find_change((args, kwargs), leaves, spec)
    if path is None:
        return ""
    for prefix, name, argument in [
        *((f"[0][{index}]", f"argument {index}", argument) for index, argument in enumerate(args)),
        *((f"[1][{name!r}]", f"argument {name!r}", argument) for name, argument in kwargs.items()),
    ]:
        if path.startswith(prefix):
            attribute = path.removeprefix(prefix)
            changed = f"{attribute!r} of its {name}" if attribute else f"its {name}"
            return f"{changed}, a {type(argument).__name__}"
    return "its arguments"


def _tensor_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that are a tensor or None: the state that a model keeps between calls."""
    return {name: value for name, value in vars(module).items() if value is None or isinstance(value, torch.Tensor)}


def _number_attributes(module: nn.Module) -> dict[str, int | float]:
    return {name: value for name, value in vars(module).items() if type(value) in (int, float)}


def _is_torch_layer(module: nn.Module) -> bool:
    """Whether a call runs code of torch only: it draws no random numbers from Python or numpy."""
    has_hooks = any(value for name, value in vars(module).items() if name.endswith("_hooks"))
    return type(module).__module__.startswith("torch.nn.modules.") and not module._modules and not has_hooks


def _generator_state() -> tuple[int, ...]:
    """Return the positions of Python's and numpy's random number generators."""
    python, numpy_state = random.getstate()[1], np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    state = numpy_state["state"]
    return (python[-1], python[0], int(state["pos"]), int(state["key"][0]))


def _same_objects(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return before.keys() == after.keys() and all(after[name] is value for name, value in before.items())


def _spec(leaf: Any) -> Any:
    """Return the specification of a tensor; any other object unchanged."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    stride = leaf.stride() if leaf.layout is torch.strided else ()
    return TensorSpec(shape=tuple(leaf.shape), stride=tuple(stride), dtype=leaf.dtype, device=leaf.device)


def _aliases(inputs: list[Any], outputs: list[Any]) -> dict[int, int]:
    """Map each output that shares a storage with an input to that input."""
    owner: dict[int, int] = {}
    for index, leaf in enumerate(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            owner.setdefault(leaf.untyped_storage()._cdata, index)
    shared: dict[int, int] = {}
    for index, leaf in enumerate(outputs):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            source = owner.get(leaf.untyped_storage()._cdata)
            if source is not None:
                shared[index] = source
    return shared


def contradicts_layers(modules: Mapping[str, nn.Module], first: Observation, second: Observation) -> bool:
    """Whether a layer with ``batch_first`` got the same batch size in two runs whose inputs differ in theirs.

    Then another dimension was resized: the steps of sequences, in a model that transposes its inputs itself.
    """
    for call, other in zip(first.calls, second.calls, strict=True):
        batch_first = getattr(modules[call.name], "batch_first", None)
        if isinstance(batch_first, bool):
            before, after = (batch_and_steps(_shapes(spec), batch_first=batch_first) for spec in (call, other))
            if before is not None and after is not None and before != after and before[0] == after[0]:
                return True
    return False


def _shapes(call: CallSpec) -> list[tuple[int, ...]]:
    """Return the shapes of a call's first two arguments, flat; ``()`` for one that is no tensor."""
    return [leaf.shape if isinstance(leaf, TensorSpec) else () for leaf in call.in_leaves[:2]]
