"""Watch a model run: which submodule is called when, with what, and what it costs.

The model runs eagerly on the example batch and on a second batch of another size. Only the *form* of each call is kept
(structure, shapes, strides, what aliases or changes an input), never the tensors. A size that differs between the two
runs is a linear function of the batch size; everything else is constant.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from stagewright.graph.macs import MacCounter
from stagewright.graph.tracing.intercept import interceptable, intercepted
from stagewright.graph.tracing.library_patches import num_collected, watch_for_packing
from stagewright.graph.tracing.untraceable import watch_for_hooks

__all__ = ["CallForm", "Observation", "TensorForm", "observe", "unique_modules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorForm:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True, kw_only=True)
class CallForm:
    """The form of one call of one module."""

    name: str
    """Qualified name of the module."""
    nth: int
    """0 for the first call of this module, 1 for its second, …"""
    parent: int | None
    """Index of the call that this one happened in."""
    macs: int = 0
    """Multiply-accumulates inside the call, those of its children too."""
    num_collected: int = 0
    """Values that hooks collected inside the call for the model's result."""
    in_spec: Any = None
    """Structure of ``(args, kwargs)``."""
    in_leaves: list[Any] = field(default_factory=list)
    """Leaves of ``(args, kwargs)``: a TensorForm for a tensor, otherwise the object itself."""
    out_spec: Any = None
    """Structure of the result."""
    out_leaves: list[Any] = field(default_factory=list)
    """Leaves of the result, as ``in_leaves``."""
    mutated: frozenset[int] = frozenset()
    """Positions among the input leaves whose storage the call wrote to."""
    aliases: dict[int, int] = field(default_factory=dict)
    """Output leaf → input leaf that shares its storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """All calls of one eager run, in the order in which they began."""

    calls: list[CallForm]
    """The root's call is the first one."""
    macs: int
    """Multiply-accumulates of the whole run."""
    packed: bool
    """Whether the model found several sequences packed into one sample."""
    unrepeatable: dict[str, str]
    """Modules whose own code has an effect that a graph would lose, with what it does."""


def unique_modules(model: nn.Module) -> dict[nn.Module, str]:
    """Every submodule that can be stood in for, with the first of its names; the root is ``""``."""
    return {module: name for name, module in model.named_modules() if interceptable(module)}


def observe(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Observation:
    """Run the model once on copies of the inputs and write down the form of every call."""
    calls: list[CallForm] = []
    stack: list[int] = []
    times: dict[str, int] = {}
    modules = unique_modules(model)
    states = {name: _plain_state(module) for module, name in modules.items()}
    unrepeatable: dict[str, str] = {}
    drawn = [_drawn()]

    def check_draws() -> None:
        """Whether the code that ran since the last look, that of the innermost call, drew random numbers of its own."""
        now = _drawn()
        if now != drawn[0] and stack:
            unrepeatable[calls[stack[-1]].name] = "draws random numbers of Python's or numpy's"
        drawn[0] = now

    def make_recorder(module: nn.Module, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def recorder(*call_args: Any, **call_kwargs: Any) -> Any:
                form = CallForm(name=name, nth=times.get(name, 0), parent=stack[-1] if stack else None)
                times[name] = form.nth + 1
                check_draws()
                if form.parent is not None and not _same_state(states[name], _plain_state(module)):
                    unrepeatable[calls[form.parent].name] = f"sets attributes of {name}"
                counts = _counts(module)
                stack.append(len(calls))
                calls.append(form)
                leaves, form.in_spec = pytree.tree_flatten((call_args, call_kwargs))
                form.in_leaves = [_form(leaf) for leaf in leaves]
                versions = {at: leaf._version for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
                before, collected = counter.total, num_collected()
                try:
                    result = original(*call_args, **call_kwargs)
                finally:
                    check_draws()
                    stack.pop()
                    states[name] = _plain_state(module)
                changed = [key for key, value in _counts(module).items() if counts.get(key, value) != value]
                if changed:
                    unrepeatable.setdefault(name, f"changes its attribute {changed[0]!r}")
                form.macs, form.num_collected = counter.total - before, num_collected() - collected
                form.mutated = frozenset(at for at, version in versions.items() if leaves[at]._version != version)
                results, form.out_spec = pytree.tree_flatten(result)
                form.out_leaves = [_form(leaf) for leaf in results]
                form.aliases = _aliases(leaves, results)
                return result

            return recorder

        return make

    stand_ins = {module: make_recorder(module, name) for module, name in modules.items()}
    with torch.inference_mode(False):
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))

    def note_hook() -> None:
        if stack:
            unrepeatable[calls[stack[-1]].name] = "puts a hook on a tensor"

    with ExitStack() as context:
        context.enter_context(torch.inference_mode(False))
        context.enter_context(torch.enable_grad())  # its code may ask: `if x.requires_grad: x.register_hook(…)`
        context.enter_context(watch_for_hooks(note_hook))
        counter = context.enter_context(MacCounter())
        packing = context.enter_context(watch_for_packing())
        context.enter_context(intercepted(stand_ins))
        model(*args, **kwargs)
    return Observation(calls=calls, macs=counter.total, packed=any(packing), unrepeatable=unrepeatable)


def _plain_state(module: nn.Module) -> dict[str, Any]:
    """Attributes of a module that hold a tensor or nothing: what a model keeps from one call to the next."""
    return {name: value for name, value in vars(module).items() if value is None or isinstance(value, torch.Tensor)}


def _counts(module: nn.Module) -> dict[str, int | float]:
    """Attributes of a module that are numbers."""
    return {name: value for name, value in vars(module).items() if type(value) in (int, float)}


def _drawn() -> tuple[int, ...]:
    """Where Python's and numpy's random number generators stand."""
    python, numpy_state = random.getstate()[1], np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    state = numpy_state["state"]
    return (python[-1], python[0], int(state["pos"]), int(state["key"][0]))


def _same_state(before: dict[str, Any], now: dict[str, Any]) -> bool:
    return before.keys() == now.keys() and all(now[name] is value for name, value in before.items())


def _form(leaf: Any) -> Any:
    """The form of a tensor; any other object as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    stride = leaf.stride() if leaf.layout is torch.strided else ()
    return TensorForm(shape=tuple(leaf.shape), stride=tuple(stride), dtype=leaf.dtype, device=leaf.device)


def _aliases(inputs: list[Any], outputs: list[Any]) -> dict[int, int]:
    """Which outputs share a storage with an input."""
    owner: dict[int, int] = {}
    for at, leaf in enumerate(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            owner.setdefault(leaf.untyped_storage()._cdata, at)
    shared: dict[int, int] = {}
    for at, leaf in enumerate(outputs):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            source = owner.get(leaf.untyped_storage()._cdata)
            if source is not None:
                shared[at] = source
    return shared
