"""The upper bound on a plan's speed-up that the pipeline bubble leaves."""

from __future__ import annotations

import math

from stagewright.spec.plan import Plan
from stagewright.spec.unequal_devices import given_speeds


def bubble_bound(plan: Plan) -> float:
    """Compute the best speed-up over one device, with perfect load balance and free communication.

    Without a pipeline, n workers reach at most n. A pipeline of p workers and m micro-batches reaches
    p · m / (m + p - 1); v stages on each worker shorten the warm-up and drain v-fold. Inference over several steps is
    one stream, so the pipeline fills only once. Workers of different speeds count with their speed relative to the
    first one, whose device runs the baseline.
    """
    mesh = plan.mesh
    stages_per_worker = max(1, plan.num_stages // mesh.pipeline)
    num_microbatches = plan.microbatches if plan.training else plan.microbatches * plan.steps
    bubble = (mesh.pipeline - 1) / stages_per_worker
    speeds = given_speeds(plan)
    num_workers = math.fsum(speeds) / speeds[0] if speeds else mesh.num_workers
    return num_workers * num_microbatches / (num_microbatches + bubble)
