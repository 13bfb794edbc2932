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
from stagewright.engine.tensor.sequence_plan import SequencePlan, plan_sequence_parallel
from stagewright.graph.unit_graph import UnitGraph
from stagewright.simulator.costs.tensor_traffic import SequenceTraffic, TensorTraffic


class RecordingAxis(TensorAxis):
    """A tensor axis without peers that records the bytes of its collectives."""

    def __init__(self, num_workers: int) -> None:
        self.group = None
        self.num_workers, self.index = num_workers, 0
        self.forward_bytes: list[int] = []
        self.backward_bytes: list[int] = []
        self.gathered_bytes: list[int] = []
        self.sequence: SequencePlan | None = None
        """The blocks whose sequence is divided, and which of them pass shards on."""
        self._sequence_bytes: dict[str, list[int]] = {
            name: [] for name in ("gathered", "replicated", "scattered", "joined", "divided")
        }

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
        whole = super().gather_shards(shard, sizes, dim)
        self.gathered_bytes.append(whole.nbytes)
        return whole

    def gather_to_region(self, shard: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        whole = super().gather_to_region(shard, sizes)
        self._sequence_bytes["gathered"].append(whole.nbytes)
        return whole

    def gather_replicated(self, shard: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        whole = super().gather_replicated(shard, sizes)
        self._sequence_bytes["replicated"].append(whole.nbytes)
        return whole

    def scatter_from_region(self, partial: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        self._sequence_bytes["scattered"].append(partial.nbytes)
        return super().scatter_from_region(partial, sizes)

    def enter_island(self, shard: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        whole = super().enter_island(shard, sizes)
        self._sequence_bytes["gathered"].append(whole.nbytes)  # and all-gathers as much in backward, on the way out
        return whole

    def join_sequence(self, shard: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        whole = super().join_sequence(shard, sizes)
        self._sequence_bytes["joined"].append(whole.nbytes)
        return whole

    def divide_sequence(self, value: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        self._sequence_bytes["divided"].append(value.nbytes)
        return super().divide_sequence(value, sizes)

    def all_gather_shards(self, shard: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        received = [pad_shard(shard, max(sizes), dim).clone() for _ in sizes]  # the memory of an all-gather
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(received, sizes, strict=True)], dim)

    def reduce_scatter_shards(self, whole: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        parts = torch.stack([pad_shard(part, max(sizes), dim) for part in torch.split(whole, list(sizes), dim)])
        received = parts.clone() if whole.device.type == "cpu" else parts  # as by an all-to-all
        return received.sum(0).narrow(dim, 0, sizes[self.index])

    def all_reduce(self, value: torch.Tensor, op: Any = None) -> torch.Tensor:
        return value

    def take(self) -> TensorTraffic:
        """Return the collectives since the last call."""
        traffic = TensorTraffic(
            forward_bytes=tuple(self.forward_bytes),
            backward_bytes=tuple(self.backward_bytes),
            gathered_bytes=tuple(self.gathered_bytes),
            sequence=SequenceTraffic(
                gathered_bytes=tuple(self._sequence_bytes["gathered"]),
                replicated_bytes=tuple(self._sequence_bytes["replicated"]),
                scattered_bytes=tuple(self._sequence_bytes["scattered"]),
                joined_bytes=tuple(self._sequence_bytes["joined"]),
                divided_bytes=tuple(self._sequence_bytes["divided"]),
            ),
        )
        for sizes in (self.forward_bytes, self.backward_bytes, self.gathered_bytes, *self._sequence_bytes.values()):
            sizes.clear()
        return traffic


def shard_alone(
    graph: UnitGraph,
    num_workers: int,
    *,
    vocab_parallel: bool = False,
    sequence_parallel: bool = False,
    gather_logits: bool = False,
) -> RecordingAxis:
    """Shard a captured model's layers in place, as worker 0 of `num_workers` holds them.

    With ``sequence_parallel``, each unit divides and joins its sequence by itself, so that it can be measured alone.
    """
    model = graph.model
    plan = plan_tensor_parallel(model, num_workers, vocab_parallel=vocab_parallel)
    require_whole_regions(plan, [call.target for call in graph.calls])
    axis = RecordingAxis(num_workers)
    if sequence_parallel:
        stages = [graph.stage(0, len(graph.calls) - 1)]
        axis.sequence = plan_sequence_parallel(model, plan.regions, stages, num_workers)
    alone = axis.sequence.without_chains() if axis.sequence is not None else None
    shard_layers(model, plan, axis, shard_dropout=False, gather_logits=gather_logits, sequence=alone)
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
    if axis.sequence is not None and len(traffic) == len(graph.calls):
        return _with_chains(graph, axis.sequence, traffic)
    return tuple(traffic)


def _with_chains(
    graph: UnitGraph, sequence: SequencePlan, traffic: Sequence[TensorTraffic]
) -> tuple[TensorTraffic, ...]:
    """Mark the units that pass shards on, and add the parameters whose gradients are summed over the workers."""
    continuing = {block.name for block in sequence.blocks if block.returns_shard}
    sizes = {name: value.numel() * value.element_size() for name, value in graph.model.named_parameters()}
    counted: set[str] = set()
    marked = []
    for call, unit in zip(graph.calls, traffic, strict=True):
        own = {name for name in sequence.partial - counted if name.startswith(f"{call.target}.")}
        counted |= own
        marked.append(
            replace(
                unit,
                sequence=replace(
                    unit.sequence, continues=call.target in continuing, partial_bytes=sum(sizes[name] for name in own)
                ),
            )
        )
    return _with_islands(graph, sequence, marked)


def _with_islands(
    graph: UnitGraph, sequence: SequencePlan, traffic: Sequence[TensorTraffic]
) -> tuple[TensorTraffic, ...]:
    """Add what a stage joins and divides where parts of a layer alternate with units that are computed whole.

    The part before such units joins; the last of them divides, and joins what its layer returns where no part follows.
    """
    parts = sequence.parts
    layers = tuple(f"{name.rpartition('.')[0]}." for name in parts)
    targets = [call.target for call in graph.calls]
    marked: list[TensorTraffic] = []
    hidden: tuple[int, ...] = ()
    for target, following, unit in zip(targets, [*targets[1:], ""], traffic, strict=True):
        own = unit.sequence
        is_part = target in parts
        hidden = own.joined_bytes if is_part else hidden
        is_next_whole = following.startswith(layers) and following not in parts
        if parts and not is_part and target.startswith(layers) and not is_next_whole:
            own = replace(own, joined_bytes=hidden, divided_bytes=hidden, continues=following in parts)
        marked.append(replace(unit, sequence=replace(own, continues=following in parts) if is_part else own))
    return tuple(marked)


def _add_to_last(traffic: list[TensorTraffic], more: TensorTraffic) -> None:
    """Add the collectives of operations after a unit to that unit's."""
    if traffic:
        last = traffic.pop()
        traffic.append(
            replace(
                last,
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
            # First, because the hook of a block with a divided sequence communicates.
            stack.callback(module.register_forward_pre_hook(begin, prepend=True).remove)
            stack.callback(module.register_forward_hook(end).remove)
        yield
