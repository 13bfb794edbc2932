"""One tensor parallel worker without peers: layers sharded as for n workers, in one process.

A unit can thus be measured as one of n workers computes it, on a machine with one device. All-reduces do nothing; their
bytes are recorded for each unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from stagewright.engine.tensor.apply import plan_tensor_parallel, require_whole_regions, shard_layers
from stagewright.engine.tensor.axis import TensorAxis
from stagewright.graph.unit_graph import UnitGraph
from stagewright.simulator.costs.tensor_traffic import TensorTraffic


class RecordingAxis(TensorAxis):
    """A tensor axis without peers that records the bytes of its all-reduces."""

    def __init__(self, num_workers: int) -> None:
        self.group = None
        self.num_workers, self.index = num_workers, 0
        self.forward_bytes: list[int] = []
        self.backward_bytes: list[int] = []

    def copy_to_region(self, value: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and value.requires_grad:
            self.backward_bytes.append(value.numel() * value.element_size())
        return super().copy_to_region(value)

    def reduce_from_region(self, partial: torch.Tensor) -> torch.Tensor:
        self.forward_bytes.append(partial.numel() * partial.element_size())
        return super().reduce_from_region(partial)

    def all_reduce(self, value: torch.Tensor) -> torch.Tensor:
        return value


def shard_alone(graph: UnitGraph, num_workers: int) -> RecordingAxis:
    """Shard a captured model's layers in place, as worker 0 of `num_workers` holds them."""
    model = graph.model
    plan = plan_tensor_parallel(model, num_workers)
    require_whole_regions(plan, [call.target for call in graph.calls])
    axis = RecordingAxis(num_workers)
    shard_layers(model, plan, axis, shard_dropout=False)
    return axis


def record_traffic(graph: UnitGraph, axis: RecordingAxis, args: Any, kwargs: Any) -> tuple[TensorTraffic, ...]:
    """Run the model once and return each unit call's all-reduces."""
    traffic: list[TensorTraffic] = []
    with _recording(graph, axis, traffic), torch.enable_grad():
        graph(*args, **kwargs)
    return tuple(traffic)


@contextmanager
def _recording(graph: UnitGraph, axis: RecordingAxis, traffic: list[TensorTraffic]) -> Iterator[None]:
    depth = 0

    def begin(_module: nn.Module, _args: Any) -> None:
        nonlocal depth
        if depth == 0:
            axis.forward_bytes.clear()
            axis.backward_bytes.clear()
        depth += 1

    def end(_module: nn.Module, _args: Any, _output: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            traffic.append(
                TensorTraffic(forward_bytes=tuple(axis.forward_bytes), backward_bytes=tuple(axis.backward_bytes))
            )

    with ExitStack() as stack:
        for module in dict.fromkeys(graph.module(call) for call in graph.calls):
            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(end).remove)
        yield
