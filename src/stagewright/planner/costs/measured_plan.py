"""The costs of a plan from those of its model, each stage at its own tensor degree."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.planner.costs.measure import ModelCosts, cut_indices, plan_microbatch_sizes
from stagewright.profiler.profile import Profile
from stagewright.simulator.costs.link_codec import LinkCodec
from stagewright.simulator.costs.overheads import EngineOverheads
from stagewright.simulator.costs.plan_costs import DegreeCosts, PlanCosts, plan_costs
from stagewright.simulator.topology import Topology
from stagewright.spec.plan import Plan


def measured_plan_costs(
    plan: Plan,
    measured: ModelCosts,
    topology: Topology,
    *,
    codecs: Sequence[LinkCodec] | None = None,
    engine_overheads: EngineOverheads | None = None,
    serial_s: float | None = None,
) -> PlanCosts:
    """Compute the costs of a plan with cuts; ``measured``: its model at each of its tensor degrees."""
    at_degrees = {costs.num_tensor: costs for costs in (*measured.other_degrees, measured)}
    last = at_degrees[plan.mesh.degrees[plan.stage_workers[-1]]]  # which computes the loss
    return plan_costs(
        plan,
        measured.profile,
        topology,
        cuts=cut_indices(measured.profile, plan.cuts),
        sizes=plan_microbatch_sizes(plan),
        tensor=measured.tensor,
        experts=measured.experts,
        model_overheads=last.overheads,
        engine_overheads=engine_overheads,
        codecs=codecs,
        whole=measured.whole,
        serial_s=serial_s,
        other_degrees=[
            DegreeCosts(degree=costs.num_tensor, profile=costs.profile, tensor=costs.tensor)
            for costs in measured.other_degrees
        ],
    )


def profile_and_speeds(plan: Plan, measured: ModelCosts, topology: Topology) -> tuple[Profile, tuple[float, ...]]:
    """Return the profile by which a plan is cut, and the speed of each stage on it.

    Where tensor degrees differ, whole layers are cut, by the speed of all workers of a stage, as in the engine.
    """
    speeds, degrees = topology.speeds(), plan.mesh.tensor_degrees
    profile = (measured.whole or measured.profile) if degrees else measured.profile
    factors = degrees or (1,) * plan.mesh.pipeline
    return profile, tuple(speeds[worker] * factors[worker] for worker in plan.stage_workers)
