"""One tensor parallel worker without peers: layers sharded as for n workers, in one process.

A unit can thus be measured as one of n workers computes it, on a machine with one device. Collectives do nothing; their
bytes are recorded for each unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from stagewright.engine.tensor.apply import plan_tensor_parallel, require_whole_regions, shard_layers
from stagewright.engine.tensor.axis import TensorAxis, pad_shard
from stagewright.engine.tensor.divided_logits import gather_logits as gather_outputs
from stagewright.graph.unit_graph import UnitGraph
from stagewright.simulator.costs.tensor_traffic import TensorTraffic


class RecordingAxis(TensorAxis):
    """A tensor axis without peers that records the bytes of its collectives."""

    def __init__(self, num_workers: int) -> None:
        self.group = None
        self.num_workers, self.index = num_workers, 0
        self.forward_bytes: list[int] = []
        self.backward_bytes: list[int] = []
        self.gathered_bytes: list[int] = []

    def copy_to_region(self, value: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and value.requires_grad:
            self.backward_bytes.append(value.numel() * value.element_size())
        return super().copy_to_region(value)

    def reduce_from_region(self, partial: torch.Tensor) -> torch.Tensor:
        self.forward_bytes.append(partial.numel() * partial.element_size())
        return super().reduce_from_region(partial)

    def reduce_values(self, value: torch.Tensor, op: Any = None) -> torch.Tensor:
        self.forward_bytes.append(value.nbytes)
        return value

    def gather_shards(self, shard: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        padded = pad_shard(shard, max(sizes), dim)
        whole = torch.cat([padded.narrow(dim, 0, size) for size in sizes], dim)
        self.gathered_bytes.append(whole.nbytes)
        return whole

    def all_reduce(self, value: torch.Tensor, op: Any = None) -> torch.Tensor:
        return value

    def take(self) -> TensorTraffic:
        """Return the collectives since the last call."""
        traffic = TensorTraffic(
            forward_bytes=tuple(self.forward_bytes),
            backward_bytes=tuple(self.backward_bytes),
            gathered_bytes=tuple(self.gathered_bytes),
        )
        for sizes in (self.forward_bytes, self.backward_bytes, self.gathered_bytes):
            sizes.clear()
        return traffic


def shard_alone(
    graph: UnitGraph, num_workers: int, *, vocab_parallel: bool = False, gather_logits: bool = False
) -> RecordingAxis:
    """Shard a captured model's layers in place, as worker 0 of `num_workers` holds them."""
    model = graph.model
    plan = plan_tensor_parallel(model, num_workers, vocab_parallel=vocab_parallel)
    require_whole_regions(plan, [call.target for call in graph.calls])
    axis = RecordingAxis(num_workers)
    shard_layers(model, plan, axis, shard_dropout=False, gather_logits=gather_logits)
    return axis


def record_traffic(
    graph: UnitGraph, axis: RecordingAxis, args: Any, kwargs: Any, loss: Callable[[Any], Any] | None = None
) -> tuple[TensorTraffic, ...]:
    """Run the model once and return each unit call's collectives; those after the last unit count for it.

    ``loss`` is computed from the output, as in training; None: the output is kept whole, as in inference.
    """
    traffic: list[TensorTraffic] = []
    with _recording(graph, axis, traffic), torch.enable_grad():
        output = graph(*args, **kwargs)
        _add_to_last(traffic, axis.take())
        if loss is None:
            gather_outputs(output)
            _add_to_last(traffic, axis.take())
        else:
            loss(output)
            after = axis.take()
            _add_to_last(traffic, replace(after, forward_bytes=(), loss_bytes=after.forward_bytes))
    return tuple(traffic)


def _add_to_last(traffic: list[TensorTraffic], more: TensorTraffic) -> None:
    """Add the collectives of operations after a unit to that unit's."""
    if traffic:
        last = traffic.pop()
        traffic.append(
            TensorTraffic(
                forward_bytes=(*last.forward_bytes, *more.forward_bytes),
                backward_bytes=(*last.backward_bytes, *more.backward_bytes),
                gathered_bytes=(*last.gathered_bytes, *more.gathered_bytes),
                loss_bytes=(*last.loss_bytes, *more.loss_bytes),
            )
        )


@contextmanager
def _recording(graph: UnitGraph, axis: RecordingAxis, traffic: list[TensorTraffic]) -> Iterator[None]:
    depth = 0

    def begin(_module: nn.Module, _args: Any) -> None:
        nonlocal depth
        if depth == 0:
            _add_to_last(traffic, axis.take())
        depth += 1

    def end(_module: nn.Module, _args: Any, _output: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            traffic.append(axis.take())

    with ExitStack() as stack:
        for module in dict.fromkeys(graph.module(call) for call in graph.calls):
            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(end).remove)
        yield
