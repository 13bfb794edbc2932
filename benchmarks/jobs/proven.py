"""What the jobs of benchmarks begin with: a worker's part of a plan, proven equal to serial."""

from __future__ import annotations

from typing import Any

from stagewright.engine.jobs.measure import load_model, prove, serial_reference
from stagewright.engine.parallel.replica import Replica, capture_for
from stagewright.engine.parity.comparison import Equality
from stagewright.zoo.model import Batch


def proven_replica(plan: Any, context: Any) -> tuple[Replica, Batch, Equality]:
    """This worker's part, the batch, and what the proof found."""
    model = load_model(plan, context)
    batch = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
    graph = capture_for(plan, model)
    reference = serial_reference(plan, model, graph, context) if context.rank == 0 else None
    replica = Replica(plan, model, context, graph)
    return replica, batch, prove(replica, batch, reference)
