"""What autograd keeps from forward to backward, unit by unit, in one run of the whole graph.

Every tensor that an operation saves passes a hook; its storage goes to the unit that runs at that moment.
What is saved between two units goes to the one that ran before. Parameters and buffers are there anyway and
left out. A tensor that one unit saves and the next one too is one storage, so it is a share between the two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stagewright.graph.preserve import preserved
from stagewright.machine.cpu_offload import is_visitor
from stagewright.profiler.profile import Amount, amounts_of_held
from stagewright.profiler.storage import model_storages, storage_of, tensors_in

if TYPE_CHECKING:
    from stagewright.graph.unit_graph import UnitGraph

__all__ = ["Kept", "watch_kept"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What one unit call leaves for the backward pass."""

    kept_bytes: Amount
    """Bytes that autograd keeps."""
    needs_gradient: tuple[bool, ...]
    """For each tensor among the call's arguments, whether its gradient is needed."""


def watch_kept(graph: UnitGraph, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Kept, ...]:
    """Runs the graph once with gradients and tells what each unit call keeps; the model is left as it was."""
    excluded = model_storages(graph.model)
    held: list[dict[Hashable, int]] = [{} for _ in graph.calls]
    needs_gradient: list[tuple[bool, ...]] = []
    alive: list[object] = []
    modules = [graph.module(call) for call in graph.calls]
    running: list[nn.Module] = []  # the unit that runs, and those units that it calls itself

    def begin(module: nn.Module, unit_args: Any, unit_kwargs: Any) -> None:
        if not running:
            assert module is modules[len(needs_gradient)], "units run in the order of the graph"
            needs_gradient.append(tuple(one.requires_grad for one in tensors_in((unit_args, unit_kwargs))))
        running.append(module)

    def end(_module: nn.Module, _args: Any, _output: Any) -> None:
        running.pop()

    def save(tensor: torch.Tensor) -> None:
        key, num_bytes, storage = storage_of(tensor)
        if num_bytes and key not in excluded and not is_visitor(tensor):
            held[max(0, len(needs_gradient) - 1)][key] = num_bytes
            alive.append(storage)

    def restore(_: None) -> torch.Tensor:
        raise AssertionError("nothing is propagated back here")

    with contextlib.ExitStack() as stack:
        stack.enter_context(preserved(graph.model))
        for module in dict.fromkeys(modules):
            stack.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(end).remove)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(save, restore))
        output = graph(*args, **kwargs)
    del output
    assert len(needs_gradient) == len(modules), "every unit of the graph runs"
    amounts = amounts_of_held(held)
    return tuple(
        Kept(kept_bytes=amount, needs_gradient=needs) for amount, needs in zip(amounts, needs_gradient, strict=True)
    )
