"""Which plans can run their stages as CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagewright.errors import UsageError

if TYPE_CHECKING:
    from stagewright.spec.plan import Mesh, Plan


def can_be_graphs(mesh: Mesh) -> bool:
    """Whether nothing communicates inside the stages of a mesh: serial plans and pipelines of one replica."""
    return mesh.num_workers == mesh.pipeline


def check_cuda_graphs(plan: Plan) -> None:
    """Raise UsageError if the plan asks for CUDA graphs and its stages can't be recorded as such."""
    if not plan.cuda_graphs:
        return
    if not can_be_graphs(plan.mesh):
        raise UsageError(
            f"cuda_graphs = true records stages in which nothing communicates, and {plan.mesh} exchanges gradients or "
            "activations inside: leave it out, or use a mesh with pipeline stages only"
        )
    if any(not device.startswith("cuda") for device in plan.devices):
        raise UsageError(
            f"cuda_graphs = true needs GPUs, and the plan has devices = {list(plan.devices)}: leave it out"
        )
    others = {
        f"recompute = {plan.recompute!r}": plan.recompute != "none" and any(plan.recompute),
        f'batch_norm = "{plan.batch_norm}"': plan.batch_norm != "plain",
    }
    if other := next((name for name, used in others.items() if used), None):
        raise UsageError(f"cuda_graphs = true does not work with {other}: leave out one of the two")
