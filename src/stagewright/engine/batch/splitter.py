"""Deal a batch out: every worker is given the whole batch and takes the micro-batches of its replica.

A smaller batch, as the last of an epoch, has micro-batches of about the size of a full batch's, so it has fewer: what
depends on their size (batch norm) stays as it is.
"""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

from stagewright.engine.batch.microbatch import batch_dims, batch_dims_of, microbatches, narrower, shares
from stagewright.engine.parity.comparison import Part
from stagewright.graph.unit_graph import UnitGraph
from stagewright.spec.plan import Plan
from stagewright.zoo.model import Batch, Model

__all__ = ["Dealer", "num_microbatches"]


def num_microbatches(size: int, plan: Plan) -> int:
    """Micro-batches of each replica for a batch of any size.

    None is larger than those of a full batch, unless otherwise one would have a single sample where theirs have more,
    or replicas that share their parameters, gathered for each micro-batch, would not have equally many.
    """
    data, most = plan.mesh.data, plan.microbatches
    share, full = shares(size, data), shares(plan.batch, data)
    num = min(most, -(-share[0] * most // full[0]))
    if full[-1] >= 2 * most:
        num = min(num, share[-1] // 2)
    if plan.shard:
        num = min(num, share[-1])
    return max(1, num)


class Dealer:
    """Cuts batches of one model as a plan says."""

    def __init__(self, plan: Plan, model: Model, graph: UnitGraph) -> None:
        self.plan, self.graph = plan, graph
        self._keywords = list(model.kwargs)
        self._input_dims = batch_dims_of(graph)
        self._target_dims = batch_dims(model.example(2).target, model.example(3).target)

    def size_of(self, batch: Batch) -> int:
        """Samples in a batch."""
        return self.graph.batch_size_of(batch.args, batch.kwargs)

    def parts(self, batch: Batch, place: torch.device, replica: int | None = None) -> list[Part]:
        """The micro-batches of one replica, or of all in order: what serial would do."""
        size = self.size_of(batch)
        num = num_microbatches(size, self.plan)
        ordered = {name: batch.kwargs[name] for name in self._keywords}
        take_inputs = narrower((batch.args, ordered), self._input_dims, batch=size)
        take_target = narrower(batch.target, self._target_dims, batch=size) if batch.target is not None else None
        found = []
        for one in range(self.plan.mesh.data) if replica is None else (replica,):
            for chunk in microbatches(size, num, data=self.plan.mesh.data, replica=one):
                args, kwargs = take_inputs(chunk.first_sample, chunk.num_samples)
                # There is no target to predict with.
                target = take_target(chunk.first_sample, chunk.num_samples) if take_target is not None else None
                if place.type != "cpu":
                    args, kwargs, target = pytree.tree_map_only(
                        torch.Tensor, lambda leaf: leaf.to(place), (args, kwargs, target)
                    )
                found.append(
                    Part(
                        replica=one,
                        args=args,
                        kwargs=kwargs,
                        target=target,
                        size=chunk.num_samples,
                        weight=chunk.weight,
                        first_sample=chunk.first_sample,
                    )
                )
        return found
