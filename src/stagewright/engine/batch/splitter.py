"""Split batches into micro-batches: every worker gets the whole batch, or the share of its replica.

A smaller batch, such as the last of an epoch, is split into fewer micro-batches of about the usual size, so that batch
norm, whose statistics depend on the micro-batch size, behaves the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from stagewright import structure
from stagewright.engine.batch.microbatch import MicroBatch, find_batch_dims, make_slicer, microbatch_layout, split_sizes
from stagewright.graph.unit_graph import UnitGraph
from stagewright.spec.plan import Plan
from stagewright.zoo.model import Batch, Model


def count_microbatches(num_samples: int, plan: Plan) -> int:
    """Return the number of micro-batches of each replica for a batch of any size.

    No micro-batch is larger than those of a full batch, with two exceptions: no micro-batch may have a single sample
    if those of a full batch have more, and FSDP replicas need equally many micro-batches, because they gather
    parameters for each.
    """
    data, most = plan.mesh.data, plan.microbatches
    sizes, full_sizes = split_sizes(num_samples, data), split_sizes(plan.batch, data)
    num = min(most, -(-sizes[0] * most // full_sizes[0]))
    if full_sizes[-1] >= 2 * most:
        num = min(num, sizes[-1] // 2)
    if plan.shard:
        num = min(num, sizes[-1])
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
    sizes = split_sizes(num_samples, plan.mesh.data)
    first = sum(sizes[:replica])
    return first, first + sizes[replica]


class BatchSplitter:
    """Splits batches of a model into the micro-batches of a plan."""

    def __init__(self, plan: Plan, model: Model, graph: UnitGraph) -> None:
        self.plan, self.graph = plan, graph
        self._keywords = list(model.kwargs)
        self._input_dims = graph.input_batch_dims()
        self._target_dims = find_batch_dims(model.example(2).target, model.example(3).target)

    def count_samples(self, batch: Batch | ReplicaShare) -> int:
        """Return the number of samples in a whole batch."""
        if isinstance(batch, ReplicaShare):
            return batch.num_samples
        return self.graph.batch_size_of(batch.args, batch.kwargs)

    def split(self, batch: Batch | ReplicaShare, device: torch.device, replica: int | None = None) -> list[MicroBatch]:
        """Return the micro-batches of one replica, or of all replicas in order, with their tensors on a device."""
        num_samples = self.count_samples(batch)
        num = count_microbatches(num_samples, self.plan)
        first, held = 0, num_samples
        if isinstance(batch, ReplicaShare):
            assert replica == batch.replica
            first, end = share_bounds(num_samples, self.plan, replica)
            batch, held = batch.batch, end - first
        kwargs = {name: batch.kwargs[name] for name in self._keywords}
        slice_inputs = make_slicer((batch.args, kwargs), self._input_dims, batch=held)
        slice_target = None  # a batch to predict with has no target
        if batch.target is not None:
            slice_target = make_slicer(batch.target, self._target_dims, batch=held)
        microbatches = []
        for index in range(self.plan.mesh.data) if replica is None else (replica,):
            for microbatch in microbatch_layout(num_samples, num, data=self.plan.mesh.data, replica=index):
                bounds = microbatch.first_sample - first, microbatch.num_samples
                tensors = *slice_inputs(*bounds), None if slice_target is None else slice_target(*bounds)
                if device.type != "cpu":
                    tensors = structure.map_tensors(lambda leaf: leaf.to(device), tensors)
                args, kwargs, target = tensors
                microbatches.append(replace(microbatch, args=args, kwargs=kwargs, target=target))
        return microbatches
