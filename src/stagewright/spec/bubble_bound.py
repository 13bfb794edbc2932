"""How much faster than serial a plan can be at best."""

from __future__ import annotations

from stagewright.spec.plan import Plan

__all__ = ["bubble_bound"]


def bubble_bound(plan: Plan) -> float:
    """The best speed-up that the plan can have with perfect balance and free links.

    Serial on n workers at best n; a pipeline of p workers and m micro-batches p · m / (m + p - 1) (fill and drain; v
    stages on each worker shorten them v-fold); a stream fills once for all its micro-batches.
    """
    mesh = plan.mesh
    rounds = max(1, plan.num_stages // mesh.pipeline)
    count = plan.microbatches if plan.training else plan.microbatches * plan.steps
    fill = (mesh.pipeline - 1) / rounds
    return mesh.data * mesh.tensor * mesh.pipeline * count / (count + fill)
