"""What the jobs of benchmarks begin with: a worker's part of a plan, proven equal to serial."""

from __future__ import annotations

from typing import Any

from stagewright.engine.dealer import Dealer
from stagewright.engine.equality import Equality, make_reference
from stagewright.engine.job import load_model, prove
from stagewright.engine.replica import Replica, capture_for, cut_indices
from stagewright.zoo.model import Batch


def proven_replica(plan: Any, context: Any) -> tuple[Replica, Batch, Equality]:
    """This worker's part, the batch, and what the proof found."""
    model = load_model(plan, context)
    batch = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
    graph = capture_for(plan, model)
    reference = None
    if context.rank == 0:
        reference = make_reference(
            graph,
            Dealer(plan, model, graph).parts(batch, context.torch_device),
            model.loss,
            training=plan.training,
            seed=plan.seed,
            device=context.torch_device,
            deferred=False,
            cuts=cut_indices(graph, plan.cuts),
            plain_attention=plan.mesh.tensor > 1,
        )
    replica = Replica(plan, model, context, graph)
    return replica, batch, prove(replica, batch, reference)
