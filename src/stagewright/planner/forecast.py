"""The forecast of a plan: combines its cuts, the model's costs and a cluster.

plan ─► model costs ─► cuts (if the plan leaves them open) ─► costs on this or another cluster ─► forecast
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from stagewright.cluster.cluster import Cluster
from stagewright.errors import UsageError
from stagewright.partition.conditions import Conditions
from stagewright.partition.split import split as split_by
from stagewright.planner.costs.device_speeds import with_measured_speeds
from stagewright.planner.costs.link_codecs import link_codecs
from stagewright.planner.costs.measure import ModelCosts, cut_indices, plan_microbatch_sizes
from stagewright.planner.costs.measured_plan import measured_plan_costs, profile_and_speeds
from stagewright.planner.costs.source import CostSource, measure_plan_size, plan_costs_of
from stagewright.simulator.costs.overheads import EngineOverheads
from stagewright.simulator.costs.plan_costs import PlanCosts
from stagewright.simulator.forecast import Forecast
from stagewright.simulator.order_search import with_order
from stagewright.simulator.simulate import predict
from stagewright.simulator.topology import Topology
from stagewright.spec.activation_checkpointing import (
    block_ends,
    checkpoint_by_block,
    checkpoints_by_block,
    recomputes_stages,
)
from stagewright.spec.plan import Axis, Plan
from stagewright.spec.plan_rules import check_plan
from stagewright.spec.searched_order import lacks_order, layouts
from stagewright.spec.unequal_devices import replica_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPlan:
    """A plan with everything its forecast needs."""

    plan: Plan
    """The plan, with its cuts."""
    measured: ModelCosts
    cluster: Cluster
    overheads: EngineOverheads
    costs: PlanCosts
    source: CostSource | None = None
    """Costs of other micro-batch sizes; None: proportional to the measured size."""

    def forecast(self) -> Forecast:
        """Predict the step."""
        return predict(self.costs, self.plan.cuts)

    def changed(self, *, measure: bool = True, **changes: Any) -> PreparedPlan:
        """Return the same with another plan, cluster or overheads.

        Another micro-batch size is measured, or only interpolated without `measure`.
        """
        fields: dict[str, Any] = {name: getattr(self, name) for name in ("plan", "measured", "cluster", "overheads")}
        fields |= changes
        rescaled = bool(_other_kinds(self.measured.profile.device, self.cluster))
        check_plan(fields["plan"])
        size = profiled_size(fields["plan"])
        if self.source is not None and size != profiled_size(self.plan):
            if measure:
                measure_plan_size(self.source, fields["plan"])
            fields["measured"] = plan_costs_of(self.source, fields["plan"])
        return prepare_plan(**fields, innermost=self.costs.topology.innermost, rescale=rescaled, source=self.source)


def prepare_plan(
    plan: Plan,
    measured: ModelCosts,
    cluster: Cluster,
    overheads: EngineOverheads | None = None,
    *,
    innermost: Axis = "pipeline",
    rescale: bool = False,
    source: CostSource | None = None,
) -> PreparedPlan:
    """Combine a plan, its model's costs and a cluster; raise UsageError if they do not match."""
    check_plan(plan)
    profile = measured.profile
    check_kind(profile.device, cluster, rescale)
    sizes = {costs.num_tensor for costs in (measured, *measured.other_degrees)}
    if not sizes >= set(plan.mesh.tensor_degrees or [plan.mesh.tensor]):
        raise UsageError(
            f"the model was measured for tensor={measured.num_tensor}, but the plan has tensor={plan.mesh.tensor}: "
            "measure it again"
        )
    plan = with_measured_speeds(plan, cluster)
    shares = replica_sizes(plan, plan.batch) if plan.speeds else ()
    topology = Topology(mesh=plan.mesh, cluster=cluster, innermost=innermost, shares=shares)
    if checkpoints_by_block(plan):
        plan = checkpoint_by_block(plan, block_ends(profile.units))
    if lacks_order(plan):
        costs = _search_order(plan, measured, topology, overheads)
    else:
        costs = _costs(plan, measured, topology, overheads)
    return PreparedPlan(
        plan=costs.plan,
        measured=measured,
        cluster=cluster,
        overheads=overheads or EngineOverheads(),
        costs=costs,
        source=source,
    )


def _costs(plan: Plan, measured: ModelCosts, topology: Topology, overheads: EngineOverheads | None) -> PlanCosts:
    """Compute the costs of a plan, with cuts by its policy if it names none."""
    profile = measured.profile
    if not plan.cuts and plan.num_stages > 1:
        plan = replace(plan, cuts=choose_cuts(plan, measured, topology))
    cuts = cut_indices(profile, plan.cuts)
    return measured_plan_costs(
        plan,
        measured,
        topology,
        codecs=link_codecs(plan, profile, cuts) if plan.has_codecs else None,
        engine_overheads=overheads,
    )


def _search_order(plan: Plan, measured: ModelCosts, topology: Topology, overheads: EngineOverheads | None) -> PlanCosts:
    """Search the order of actions for each open number of stages and placement; return the costs of the best."""
    open_plans = layouts(plan, len(measured.profile.units)) or [plan]
    found = [with_order(_costs(layout, measured, topology, overheads)) for layout in open_plans]
    costs, _ = min(found, key=lambda pair: (not pair[1].fits, pair[1].step_s))
    return costs


def profiled_size(plan: Plan) -> tuple[int, int]:
    """Return the size at which a plan's model is profiled: largest micro-batch, tensor parallel size."""
    return max(plan_microbatch_sizes(plan)), plan.mesh.tensor


def choose_cuts(plan: Plan, measured: ModelCosts, topology: Topology) -> tuple[str, ...]:
    """Choose cuts by the plan's policy, with the speeds of the stages' devices."""
    profile, speeds = profile_and_speeds(plan, measured, topology)
    conditions = Conditions(
        num_microbatches=plan.microbatches,
        recompute=recomputes_stages(plan),
        speeds=speeds if plan.split in ("optimal", "time") else None,
    )
    return split_by(profile, plan.num_stages, plan.split, conditions).cut_names


def check_kind(device: str, cluster: Cluster, rescale: bool) -> None:
    """Raise UsageError for a profile of another kind of device, unless it may be rescaled."""
    others = _other_kinds(device, cluster)
    if others and not rescale:
        raise UsageError(
            f"the profile was measured on {device}, but the cluster has {others[0]} devices: profile the model on one, "
            "or use --rescale to multiply its times by the cluster's speeds"
        )


def _other_kinds(device: str, cluster: Cluster) -> list[str]:
    """Return the kinds of the cluster's devices that differ from the profiled one."""
    return sorted({group.kind for group in cluster.devices} - {device.partition(":")[0]})
