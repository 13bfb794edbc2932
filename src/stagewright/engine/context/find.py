"""Find the blocks of a model that context parallelism divides: the units that call attention, and what that works on.

The captured graph runs once on the example. Which input an attention call takes its keys from is read from autograd's
graph: lengths do not say, because an encoder and a decoder may have equally many tokens. Inputs of which
only masks are made stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from stagewright import structure
from stagewright.engine.context.multihead import MultiheadCall
from stagewright.engine.context.sources import Sources
from stagewright.engine.context.unit_call import UnitCall
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
            watch.check_unused(graph(*args, **kwargs))
    finally:
        for handle in handles:
            handle.remove()
    if not watch.blocks:
        raise UsageError(
            f"context={num_workers} divides the sequence of blocks that call scaled_dot_product_attention or "
            f"nn.MultiheadAttention, and {type(graph.model).__name__} has none; load it with "
            "attn_implementation='sdpa', or use data or pipeline"
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
        self._unit: UnitCall | None = None
        self._weights: list[tuple[str, torch.Tensor]] = []
        """The weights of attention that calls in units have returned."""

    def begin(self, target: str, inputs: Any) -> Any:
        """Return the inputs of a unit, as tensors by which autograd's graph begins."""
        self._unit = UnitCall(target)
        return structure.map_tensors(self._unit.trace, inputs)

    def end(self) -> None:
        """Record the attention calls of a unit."""
        unit, self._unit = self._unit, None
        if unit is None or (sources := unit.sources()) is None:
            return
        if self.blocks.setdefault(unit.target, sources) != sources:
            raise self._refused(f"{unit.target} is called several times, with attention to different inputs")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        self.check_unused((args, kwargs))
        if func is functional.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask")
            given: dict[str, Any] = {"attn_mask": None, **dict(zip(names, args, strict=False)), **kwargs}
            unit = self._open_unit()
            self._check(unit, unit.add(*(given[name] for name in names)))
            return func(*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            return self._multihead(MultiheadCall.of(args, kwargs), func(*args, **kwargs))
        result = func(*args, **kwargs)
        if self._unit is not None:
            self._unit.follow((args, kwargs), result)
        return result

    def _multihead(self, call: MultiheadCall, result: tuple[torch.Tensor, torch.Tensor | None]) -> Any:
        """Record a call of torch's own attention, and return its result."""
        unit = self._open_unit()
        if option := call.extra_key():
            raise self._refused(
                f"{unit.target} has an nn.MultiheadAttention with {option}=True, which adds a key that is no token",
                f"build it with {option}=False, or use data or pipeline parallelism",
            )
        self._check(unit, unit.add_multihead(call))
        if result[1] is not None:
            self._weights.append((unit.target, result[1]))
        return result

    def check_unused(self, values: Any) -> None:
        """Refuse the use of weights of attention among these values."""
        if not self._weights:
            return
        given = {id(value) for value in structure.tensors(values)}
        for target, weights in self._weights:
            if id(weights) in given:
                raise self._refused(
                    f"{target} has an nn.MultiheadAttention whose weights of shape {[*weights.shape]} are used, and "
                    "ring and all-to-all attention make no weights",
                    "use its output alone, with need_weights=False, or use data or pipeline parallelism",
                )

    def _open_unit(self) -> UnitCall:
        if self._unit is None:
            raise self._refused("attention is called outside of any unit", "name the blocks with --units")
        return self._unit

    def _check(self, unit: UnitCall, reason: str) -> None:
        if reason:
            raise self._refused(f"{unit.target} {reason}")

    def _refused(self, reason: str, fix: str = "use data or pipeline parallelism instead") -> UsageError:
        return UsageError(f"context={self._num_workers} can't divide the sequence: {reason}; {fix}")
