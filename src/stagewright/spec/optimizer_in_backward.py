"""Which plans can step the optimizer inside backward.

Each parameter is stepped as soon as its gradient is final, and the gradient is freed. That is so in the backward of a
single micro-batch: with several, gradients are accumulated, so all of them are there before the last backward, and
nothing would be gained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagewright.errors import UsageError
from stagewright.schedules.rules import SCHEDULES

if TYPE_CHECKING:
    from stagewright.spec.plan import Mesh, Plan


def can_step_in_backward(mesh: Mesh) -> bool:
    """Whether gradients are final when backward makes them: nothing sums them over replicas or tokens."""
    return mesh.data == mesh.context == 1


def check_optimizer_in_backward(plan: Plan) -> None:
    """Raise UsageError if the plan steps the optimizer in backward and its gradients are not final there."""
    if not plan.optimizer_in_backward:
        return
    others = {
        "training = false": (not plan.training, "it trains"),
        f"microbatches = {plan.microbatches}": (
            plan.microbatches > 1,
            "gradients of several micro-batches are accumulated before a step",
        ),
        f"clip = {plan.clip}": (plan.clip is not None, "the norm of all gradients is known after backward only"),
        f'precision = "{plan.precision}"': (
            plan.precision == "fp16-mixed",
            "an overflow of scaled gradients is known after backward only",
        ),
        str(plan.mesh): (not can_step_in_backward(plan.mesh), "gradients are summed over replicas or tokens first"),
        f'schedule = "{plan.schedule}"': (
            plan.mesh.pipeline > 1 and SCHEDULES[plan.schedule].splits_backward,
            "it makes the gradients of weights apart from backward",
        ),
        "cuda_graphs = true": (plan.cuda_graphs, "graphs accumulate gradients by themselves"),
    }
    for other, (is_used, reason) in others.items():
        if is_used:
            raise UsageError(
                f"optimizer_in_backward = true does not work with {other}, because {reason}: leave out one of the two"
            )
