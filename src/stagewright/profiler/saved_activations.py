"""Saved activations: what autograd saves for backward, unit by unit, in one run of the whole graph.

A hook sees every tensor that an operation saves and attributes its storage to the unit that is running. Tensors saved
between two units count for the earlier one. Parameters and buffers are excluded, because they are in memory anyway. A
tensor that two units save is one storage, recorded as a share between them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stagewright.graph.attention.checkpointing import checkpointed_attentions
from stagewright.graph.preserve import preserved
from stagewright.machine.cpu_offload import is_temporary
from stagewright.profiler.profile import Amount, amounts_with_shares
from stagewright.profiler.storage import model_storages, storage_of, tensors_in

if TYPE_CHECKING:
    from stagewright.graph.unit_graph import UnitGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedActivations:
    """What one unit call saves for the backward pass."""

    saved_bytes: Amount
    needs_gradient: tuple[bool, ...]
    """For each tensor among the call's arguments, whether it requires a gradient."""
    later_bytes: int = 0
    """What the call saves after its last attention, if attention is recomputed."""


def measure_saved_activations(
    graph: UnitGraph, args: Sequence[Any], kwargs: Mapping[str, Any], *, attention: bool = False
) -> tuple[SavedActivations, ...]:
    """Run the graph once with gradients and measure what each unit call saves; the model's state is preserved.

    ``attention``: whether attention is recomputed.
    """
    excluded = model_storages(graph.model)
    saved: list[dict[Hashable, int]] = [{} for _ in graph.calls]
    before_end: list[set[Hashable]] = [set() for _ in graph.calls]
    needs_gradient: list[tuple[bool, ...]] = []
    alive: list[object] = []
    modules = [graph.module(call) for call in graph.calls]
    running: list[nn.Module] = []  # the running unit, and other units that it calls itself

    def begin(module: nn.Module, unit_args: Any, unit_kwargs: Any) -> None:
        if not running:
            assert module is modules[len(needs_gradient)], "units run in the order of the graph"
            needs_gradient.append(tuple(tensor.requires_grad for tensor in tensors_in((unit_args, unit_kwargs))))
        running.append(module)

    def end(_module: nn.Module, _args: Any, _output: Any) -> None:
        running.pop()

    def save(tensor: torch.Tensor) -> None:
        key, num_bytes, storage = storage_of(tensor)
        if num_bytes and key not in excluded and not is_temporary(tensor):
            saved[max(0, len(needs_gradient) - 1)][key] = num_bytes
            alive.append(storage)

    def restore(_: None) -> torch.Tensor:
        raise AssertionError("this run has no backward pass")

    def end_core(_attention: nn.Module) -> None:
        unit = max(0, len(needs_gradient) - 1)
        before_end[unit] = set(saved[unit])

    with contextlib.ExitStack() as stack:
        if attention:
            stack.enter_context(checkpointed_attentions(modules, on_core_end=end_core))
        stack.enter_context(preserved(graph.model))
        graph.flatten(tuple(args), kwargs)  # may run the model to check its branches, which the hooks must not count
        for module in dict.fromkeys(modules):
            stack.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(end).remove)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(save, restore))
        output = graph(*args, **kwargs)
    del output
    assert len(needs_gradient) == len(modules), "every unit of the graph runs"
    amounts = amounts_with_shares(saved)
    later = [
        sum(size for key, size in sizes.items() if key not in before)
        for sizes, before in zip(saved, before_end, strict=True)
    ]
    return tuple(
        SavedActivations(saved_bytes=amount, needs_gradient=needs, later_bytes=size)
        for amount, needs, size in zip(amounts, needs_gradient, later, strict=True)
    )
