"""Find the blocks of a model that context parallelism divides: the units that call attention, and what that works on.

The captured graph runs once on the example. Which input an attention call takes its keys from is read from autograd's
graph: lengths do not say, because an encoder and a decoder may have equally many tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from stagewright import structure
from stagewright.engine.context.sources import SEQUENCE_DIM, Sources
from stagewright.errors import UsageError
from stagewright.graph.preserve import preserved
from stagewright.graph.unit_graph import UnitGraph


def find_blocks(graph: UnitGraph, args: Any, kwargs: Any, num_workers: int) -> dict[str, Sources]:
    """Return the units that call attention; raise ``UsageError`` if there is none or one can't be divided."""
    watch = _Watch(num_workers)
    handles = []
    for target in dict.fromkeys(call.target for call in graph.calls):
        module = graph.model.get_submodule(target)
        begin = _Begin(watch, target)
        handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
        handles.append(module.register_forward_hook(lambda *_: watch.end(), always_call=True))
    try:
        with torch.enable_grad(), preserved(graph.model), watch:
            graph(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    if not watch.blocks:
        raise UsageError(
            f"context={num_workers} divides the sequence of blocks that call scaled_dot_product_attention, and "
            f"{type(graph.model).__name__} has none; load it with attn_implementation='sdpa', or use data or pipeline"
        )
    return watch.blocks


class _Begin:
    """A hook: the call of a unit begins."""

    def __init__(self, watch: _Watch, target: str) -> None:
        self._watch, self._target = watch, target

    def __call__(self, module: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        return self._watch.begin(self._target, (args, dict(kwargs)))


class _Watch(TorchFunctionMode):
    """Observes the attention calls of units."""

    def __init__(self, num_workers: int) -> None:
        super().__init__()
        self.blocks: dict[str, Sources] = {}
        self._num_workers = num_workers
        self._unit: _UnitCall | None = None

    def begin(self, target: str, inputs: Any) -> Any:
        """Return the inputs of a unit, as tensors by which autograd's graph begins."""
        self._unit = _UnitCall(target)
        return structure.map_tensors(self._unit.trace, inputs)

    def end(self) -> None:
        """Record the attention calls of a unit."""
        unit, self._unit = self._unit, None
        if unit is None or not unit.keys:
            return
        assert unit.hidden is not None
        sources = Sources(hidden=unit.hidden, keys=tuple(unit.keys), makes_masks=unit.makes_masks)
        if self.blocks.setdefault(unit.target, sources) != sources:
            raise self._refused(f"{unit.target} is called several times, with attention to different inputs")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask")
            given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            if self._unit is None:
                raise self._refused("attention is called outside of any unit", "name the blocks with --units")
            reason = self._unit.add(given["query"], given["key"], given.get("attn_mask"))
            if reason:
                raise self._refused(f"{self._unit.target} {reason}")
        return func(*args, **(kwargs or {}))

    def _refused(self, reason: str, fix: str = "use data or pipeline parallelism instead") -> UsageError:
        return UsageError(f"context={self._num_workers} can't divide the sequence: {reason}; {fix}")


class _UnitCall:
    """One call of a unit: its inputs, and what its attention calls work on."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.hidden: int | None = None
        self.keys: list[int] = []
        self.makes_masks = False
        self._inputs: list[torch.Tensor] = []
        self._roots: dict[int, int] = {}
        """Numbers of inputs with features, by the identity of the tensor where autograd's graph begins."""

    def trace(self, value: torch.Tensor) -> torch.Tensor:
        """Return an input as a tensor that can be traced back to."""
        if _has_features(value):
            root = value.detach().requires_grad_()
            self._roots[id(root)] = len(self._inputs)
            if self.hidden is None:
                self.hidden = len(self._inputs)
            value = root.clone()  # the block may change its input in place
        self._inputs.append(value)
        return value

    def add(self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> str:
        """Add an attention call; return why it can't be divided, or ""."""
        if self.hidden is None:
            return "takes no hidden states of the shape [samples, tokens, features]"
        length = self._length(self.hidden)
        if query.dim() != 4 or query.shape[-2] != length:
            return f"has hidden states of {length} tokens, of which attention gets queries of shape {[*query.shape]}"
        traced = {self._roots[root] for root in _roots(key) if root in self._roots}
        candidates = [self.hidden] if not traced or self.hidden in traced else sorted(traced)
        source = next((number for number in candidates if self._length(number) == key.shape[-2]), None)
        if source is None:
            own = ", ".join(str(self._length(number)) for number in candidates)
            return f"attends from {length} to {key.shape[-2]} tokens, made of inputs of {own}"
        self.keys.append(source)
        self.makes_masks |= mask is not None and all(mask is not value for value in self._inputs)
        return ""

    def _length(self, number: int) -> int:
        return self._inputs[number].shape[SEQUENCE_DIM]


def _has_features(value: torch.Tensor) -> bool:
    """Whether a tensor may be hidden states: samples, tokens, features."""
    return value.is_floating_point() and value.dim() == 3


def _roots(value: torch.Tensor) -> Iterable[int]:
    """Yield the identities of the tensors where the autograd graph of a value begins."""
    waiting, done = [value.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in done:
            continue
        done.add(node)
        if hasattr(node, "variable"):
            yield id(node.variable)
        waiting.extend(next_node for next_node, _ in node.next_functions)
