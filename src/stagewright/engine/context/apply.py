"""Context parallelism: divide the sequence inside the blocks of a model, derived from the model alone.

    embedding ─ scatter ─ block ─ gather ─ … ─ scatter ─ block ─ gather ─ norm ─ head ─ loss
    replicated            divided                        divided         replicated

A block is a unit that calls ``scaled_dot_product_attention``, by itself or through transformers' attention interface.
Its code sees only this worker's positions: of hidden states, position embeddings and position numbers. Masks stay
those of the whole sequence. Since everything outside of blocks is replicated, labels are shifted and losses averaged as
on one device. Each worker has its positions' part of the gradients of blocks: they are summed over the axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from stagewright import structure
from stagewright.engine.context.attention import DividedSequence, Exchange
from stagewright.engine.context.axis import ContextAxis, zigzag
from stagewright.engine.tensor.axis import process_group_of
from stagewright.errors import UsageError
from stagewright.graph.preserve import preserved
from stagewright.graph.unit_graph import UnitGraph

_SEQUENCE = 1  # the dimension of tokens in hidden states, position embeddings and position numbers


def find_blocks(graph: UnitGraph, args: Any, kwargs: Any, num_workers: int) -> list[str]:
    """Return the units that call attention; raise ``UsageError`` if there is none or one can't be divided."""
    targets = list(dict.fromkeys(call.target for call in graph.calls))
    watch = _Watch(num_workers)
    handles = []
    for target in targets:
        module = graph.model.get_submodule(target)
        handles.append(module.register_forward_pre_hook(lambda *_, target=target: watch.open(target)))
        handles.append(module.register_forward_hook(lambda *_: watch.close(), always_call=True))
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
    return list(watch.blocks)


def apply_context_parallel(model: nn.Module, blocks: Iterable[str], group: Any, exchange: Exchange) -> ContextAxis:
    """Divide the sequence inside the named blocks over ``group``, in place."""
    axis = ContextAxis(process_group_of(group))
    for name in blocks:
        region = _Block(axis, exchange, name)
        module = model.get_submodule(name)
        module.register_forward_pre_hook(region.begin, with_kwargs=True)
        module.register_forward_hook(region.end, always_call=True)
    return axis


class _Block:
    """The entry and exit of one block."""

    def __init__(self, axis: ContextAxis, exchange: Exchange, name: str) -> None:
        self._axis, self._name = axis, name
        self._mode = DividedSequence(axis, exchange, name)
        self._is_open = False

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Keep this worker's positions of the block's inputs."""
        tensors = structure.tensors((args, dict(kwargs)))
        hidden = next((leaf for leaf in tensors if leaf.is_floating_point() and leaf.dim() == 3), None)
        if hidden is None:
            raise UsageError(
                f"context={self._axis.num_workers} can't divide {self._name}: it takes no hidden states of the shape "
                "[samples, tokens, features]; name its blocks with --units"
            )
        self._mode.length = hidden.shape[_SEQUENCE]
        zigzag(self._mode.length, self._axis.num_workers)  # raises where the length can't be divided

        def divide(leaf: torch.Tensor) -> torch.Tensor:
            is_sequence = leaf.dim() in (2, 3) and leaf.shape[_SEQUENCE] == self._mode.length
            return self._axis.scatter(leaf, _SEQUENCE) if is_sequence else leaf

        divided = structure.map_tensors(divide, (args, dict(kwargs)))
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._is_open = True
        return divided

    def end(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Gather all positions of the block's outputs."""
        if self._is_open:
            self._is_open = False
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        size = self._mode.length // self._axis.num_workers

        def gather(leaf: torch.Tensor) -> torch.Tensor:
            if leaf.dim() < 2 or leaf.shape[_SEQUENCE] != size:
                raise UsageError(
                    f"context={self._axis.num_workers} can't divide {self._name}: it returns a tensor of shape "
                    f"{list(leaf.shape)}, whose dimension 1 is not the sequence; use data or pipeline instead"
                )
            return self._axis.gather(leaf, _SEQUENCE)

        return None if output is None else structure.map_tensors(gather, output)


class _Watch(TorchFunctionMode):
    """Finds the units that call attention."""

    def __init__(self, num_workers: int) -> None:
        super().__init__()
        self.blocks: dict[str, None] = {}
        self._num_workers = num_workers
        self._open: list[str] = []

    def open(self, target: str) -> None:
        self._open.append(target)

    def close(self) -> None:
        self._open.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask")
            given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            query, key, mask = given["query"], given["key"], given.get("attn_mask")
            reason = ""
            if not self._open:
                reason = "attention is called outside of any unit; name the blocks with --units"
            elif query.dim() != 4 or query.shape[-2] != key.shape[-2]:
                reason = f"{self._open[0]} attends from {query.shape[-2]} to {key.shape[-2]} tokens, not to its own"
            elif mask is not None and mask.requires_grad:
                reason = f"{self._open[0]} adds a trained bias to its attention scores"
            if reason:
                raise UsageError(f"context={self._num_workers} can't divide the sequence: {reason}")
            self.blocks[self._open[0]] = None
        return func(*args, **(kwargs or {}))
