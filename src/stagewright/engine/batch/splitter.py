"""Split batches into micro-batches: every worker gets the whole batch, or the share of its replica.

A smaller batch, such as the last of an epoch, is split into fewer micro-batches of about the usual size, so that batch
norm, whose statistics depend on the micro-batch size, behaves the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stagewright import structure
from stagewright.engine.batch.microbatch import MicroBatch, make_slicer, microbatch_layout
from stagewright.errors import UsageError
from stagewright.graph.unit_graph import UnitGraph
from stagewright.sample_lists import BatchDims
from stagewright.spec.plan import Plan
from stagewright.spec.unequal_devices import replica_sizes
from stagewright.zoo.model import Batch, Model


def count_microbatches(num_samples: int, plan: Plan) -> int:
    """Return the number of micro-batches of each replica for a batch of any size.

    No micro-batch is larger than those of a full batch, with two exceptions: no micro-batch may have a single sample
    if those of a full batch have more, and FSDP, ZeRO-2 and expert parallel replicas need equally many, because
    they communicate in each.
    """
    most = plan.microbatches
    sizes, full_sizes = replica_sizes(plan, num_samples), replica_sizes(plan, plan.batch)
    num = min(most, -(-max(sizes) * most // max(full_sizes)))
    if min(full_sizes) >= 2 * most:
        num = min(num, min(sizes) // 2)
    if plan.communicates_every_microbatch:
        num = min(num, *sizes)
    return max(1, num)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShare:
    """A replica's part of a batch, where each replica reads only its own samples."""

    batch: Batch
    replica: int
    num_samples: int
    """Samples of the whole batch, at least one for each replica."""


def share_bounds(num_samples: int, plan: Plan, replica: int) -> tuple[int, int]:
    """Return the first sample of a replica's part of a batch, and the one after its last."""
    sizes = replica_sizes(plan, num_samples)
    first = sum(sizes[:replica])
    return first, first + sizes[replica]


IGNORED = -100  # the target of a token that does not count, as in torch's cross entropy and in transformers


def count_tokens(batch: Batch) -> int:
    """Count the targets that a loss averages over; in a causal language model, those after the first token."""
    labels = batch.kwargs.get("labels") if batch.target is None else batch.target
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        raise UsageError("loss_items='tokens' needs integer targets; give a function that counts a batch's items")
    is_causal = batch.target is None and labels.ndim > 1  # the model shifts its labels itself
    return int((labels[..., 1:] if is_causal else labels).ne(IGNORED).sum())


class BatchSplitter:
    """Splits batches of a model into the micro-batches of a plan."""

    def __init__(
        self, plan: Plan, model: Model, graph: UnitGraph, count_items: Callable[[Batch], float] | None = None
    ) -> None:
        self.plan, self.graph = plan, graph
        self.count_items = count_items
        """Counts the items of a micro-batch that its loss is the mean of; samples by default."""
        self._keywords = list(model.kwargs)
        examples = model.example(2), model.example(3)
        self._input_dims = BatchDims.find(*map(self._inputs, examples))
        if not self._input_dims.lists:
            self._input_dims = BatchDims(dims=graph.input_batch_dims())
        self._target_dims = BatchDims.find(*(example.target for example in examples))

    def count_samples(self, batch: Batch | ReplicaShare | Sequence[Batch]) -> int:
        """Return the number of samples in a whole batch, or in a list of micro-batches."""
        if isinstance(batch, ReplicaShare):
            return batch.num_samples
        if not isinstance(batch, Batch):
            return sum(map(self.count_samples, batch))
        if not self._input_dims.lists:
            return self.graph.batch_size_of(batch.args, batch.kwargs)
        return self._input_dims.count(self._inputs(batch)) or 0

    def split(
        self, batch: Batch | ReplicaShare | Sequence[Batch], device: torch.device, replica: int | None = None
    ) -> list[MicroBatch]:
        """Return the micro-batches of one replica, or of all replicas in order, with their tensors on a device.

        A list of batches is taken as the micro-batches themselves, which may differ in shape.
        """
        if isinstance(batch, ReplicaShare) and self.count_items is not None:
            raise UsageError("loss_items other than samples need the whole batch on every worker")
        if isinstance(batch, (Batch, ReplicaShare)):
            return self._weigh(self._slice(batch, device), replica)
        return self._weigh(self._place(batch, device), replica)

    def _inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return batch.args, {name: batch.kwargs[name] for name in self._keywords}

    def _place(self, batches: Sequence[Batch], device: torch.device) -> list[MicroBatch]:
        """Distribute whole micro-batches over the replicas, in order."""
        if self.plan.communicates_every_microbatch and len(batches) % self.plan.mesh.data:
            kind = "FSDP" if self.plan.shard else "ZeRO-2" if self.plan.zero else "expert parallel"
            raise UsageError(
                f"{kind} replicas need equally many micro-batches, but {len(batches)} are to be divided among "
                f"{self.plan.mesh.data}; give a multiple of {self.plan.mesh.data}"
            )
        total = sum(map(self.count_samples, batches))
        microbatches, first, position = [], 0, 0
        for replica, count in enumerate(self._replica_counts(len(batches))):
            for batch in batches[position : position + count]:
                size = self.count_samples(batch)
                microbatch = MicroBatch(
                    num_samples=size,
                    weight=size / total,
                    first_sample=first,
                    replica=replica,
                    args=batch.args,
                    kwargs={name: batch.kwargs[name] for name in self._keywords},
                    target=batch.target,
                )
                microbatches.append(move_microbatch(microbatch, device))
                first += size
            position += count
        return microbatches

    def _replica_counts(self, num_batches: int) -> tuple[int, ...]:
        """Return how many whole micro-batches each replica gets."""
        if self.plan.communicates_every_microbatch:
            return (num_batches // self.plan.mesh.data,) * self.plan.mesh.data
        return replica_sizes(self.plan, num_batches)

    def _weigh(self, microbatches: list[MicroBatch], replica: int | None) -> list[MicroBatch]:
        """Weight micro-batches by the items that their losses are means of, and select those of a replica."""
        if self.count_items is not None:
            parts = [Batch(args=part.args, kwargs=part.kwargs, target=part.target) for part in microbatches]
            counts = [float(self.count_items(part)) for part in parts]
            if sum(counts) <= 0:
                raise UsageError(f"the batch has {sum(counts):g} items to average the loss over; give at least one")
            microbatches = [
                dataclasses.replace(microbatch, weight=count / sum(counts))
                for microbatch, count in zip(microbatches, counts, strict=True)
            ]
        return [microbatch for microbatch in microbatches if replica in (None, microbatch.replica)]

    def _slice(self, batch: Batch | ReplicaShare, device: torch.device) -> list[MicroBatch]:
        """Slice the micro-batches of all replicas out of a batch, or those of one out of its share."""
        num_samples = self.count_samples(batch)
        num, sizes = count_microbatches(num_samples, self.plan), replica_sizes(self.plan, num_samples)
        first, held, replicas = 0, num_samples, range(self.plan.mesh.data)
        if isinstance(batch, ReplicaShare):
            first, end = share_bounds(num_samples, self.plan, batch.replica)
            replicas = range(batch.replica, batch.replica + 1)
            batch, held = batch.batch, end - first
        slice_inputs = make_slicer(self._inputs(batch), self._input_dims, batch=held)
        slice_target = None  # a batch to predict with has no target
        if batch.target is not None:
            slice_target = make_slicer(batch.target, self._target_dims, batch=held)
        microbatches = []
        for index in replicas:
            for microbatch in microbatch_layout(num, sizes, index):
                bounds = microbatch.first_sample - first, microbatch.num_samples
                tensors = *slice_inputs(*bounds), None if slice_target is None else slice_target(*bounds)
                args, kwargs, target = tensors
                sliced = dataclasses.replace(microbatch, args=args, kwargs=kwargs, target=target)
                microbatches.append(move_microbatch(sliced, device))
        return microbatches


def move_microbatch(microbatch: MicroBatch, device: torch.device) -> MicroBatch:
    """Return a micro-batch with its tensors on a device."""
    if device.type == "cpu":
        return microbatch
    values = microbatch.args, microbatch.kwargs, microbatch.target, microbatch.inputs
    args, kwargs, target, inputs = structure.map_tensors(lambda leaf: leaf.to(device), values)
    return dataclasses.replace(microbatch, args=args, kwargs=kwargs, target=target, inputs=inputs)
