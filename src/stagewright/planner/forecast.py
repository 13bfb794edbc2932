"""From a plan to its forecast: cuts, measurements and a cluster brought together.

plan ─► measured model ─► cuts (where the plan leaves them open) ─► costs on this or another cluster ─► forecast
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from stagewright.cluster.cluster import Cluster
from stagewright.errors import UsageError
from stagewright.partition.conditions import Conditions
from stagewright.partition.split import split as split_by
from stagewright.planner.costs.link_codecs import link_codecs
from stagewright.planner.costs.measure import ModelCosts, plan_microbatch_sizes, cut_indices
from stagewright.planner.costs.source import CostSource
from stagewright.simulator.costs.plan_costs import PlanCosts, plan_costs
from stagewright.simulator.forecast import Forecast
from stagewright.simulator.costs.overheads import EngineOverheads
from stagewright.simulator.simulate import predict
from stagewright.simulator.topology import Topology
from stagewright.spec.plan import Axis, Plan
from stagewright.spec.plan_rules import check_plan

__all__ = ["PreparedPlan", "check_kind", "profiled_size", "prepare_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPlan:
    """A plan with everything that its forecast needs."""

    plan: Plan
    """The plan, its cuts chosen."""
    measured: ModelCosts
    """Its model, measured."""
    cluster: Cluster
    """Where it would run."""
    terms: EngineOverheads
    """The engine's own costs there."""
    costs: PlanCosts
    """What each action costs."""
    source: CostSource | None = None
    """What other sizes of micro-batch cost; None: as much for each sample as those that were measured."""

    def forecast(self) -> Forecast:
        """The predicted step."""
        return predict(self.costs, self.plan.cuts)

    def changed(self, *, sharp: bool = True, **changes: Any) -> PreparedPlan:
        """The same with another plan, cluster or terms: what if; what was rescaled once may be again.

        Micro-batches of another size are measured, unless they need not be `sharp`: then they are by what is known.
        """
        given = {"plan": self.plan, "measured": self.measured, "cluster": self.cluster, "terms": self.terms, **changes}
        rescaled = bool(_other_kinds(self.measured.profile.device, self.cluster))
        check_plan(given["plan"])
        wanted = profiled_size(given["plan"])
        if self.source is not None and wanted != profiled_size(self.plan):
            if sharp:
                self.source.measure_size(*wanted)
            given["measured"] = self.source.model(*wanted)
        return prepare_plan(**given, innermost=self.costs.topology.innermost, rescale=rescaled, source=self.source)


def prepare_plan(
    plan: Plan,
    measured: ModelCosts,
    cluster: Cluster,
    terms: EngineOverheads | None = None,
    *,
    innermost: Axis = "pipeline",
    rescale: bool = False,
    source: CostSource | None = None,
) -> PreparedPlan:
    """Bring plan, measurements and cluster together; refuses what does not belong together."""
    check_plan(plan)
    profile = measured.profile
    check_kind(profile.device, cluster, rescale)
    if measured.num_tensor != plan.mesh.tensor:
        raise UsageError(
            f"the model was measured for tensor={measured.num_tensor}, but the plan has tensor={plan.mesh.tensor}: "
            "measure it again"
        )
    topology = Topology(mesh=plan.mesh, cluster=cluster, innermost=innermost)
    if not plan.cuts and plan.num_stages > 1:
        plan = replace(plan, cuts=choose_cuts(plan, measured, topology))
    cuts = cut_indices(profile, plan.cuts)
    costs = plan_costs(
        plan,
        profile,
        topology,
        cuts=cuts,
        codecs=link_codecs(plan, profile, cuts) if plan.has_codecs else None,
        sizes=plan_microbatch_sizes(plan),
        tensor=measured.tensor,
        model_overheads=measured.terms,
        engine_overheads=terms,
        whole=measured.whole,
    )
    return PreparedPlan(
        plan=plan, measured=measured, cluster=cluster, terms=terms or EngineOverheads(), costs=costs, source=source
    )


def profiled_size(plan: Plan) -> tuple[int, int]:
    """What a plan's model is measured at: samples of its largest micro-batch, workers that share its layers."""
    return max(plan_microbatch_sizes(plan)), plan.mesh.tensor


def choose_cuts(plan: Plan, measured: ModelCosts, topology: Topology) -> tuple[str, ...]:
    """The cuts of the plan's policy, with the speeds of the stages' devices."""
    workers = plan.stage_workers
    speeds = topology.speeds()
    conditions = Conditions(
        num_microbatches=plan.microbatches,
        recompute=plan.recompute != "none",
        speeds=[speeds[worker] for worker in workers] if plan.split in ("optimal", "time") else None,
    )
    return split_by(measured.profile, plan.num_stages, plan.split, conditions).cut_names


def check_kind(device: str, cluster: Cluster, rescale: bool) -> None:
    """Refuse a profile of another kind of device, unless it is to be rescaled."""
    others = _other_kinds(device, cluster)
    if others and not rescale:
        raise UsageError(
            f"the profile was measured on {device}, but the cluster has {others[0]} devices: profile the model on one, "
            "or use --rescale to multiply its times by the cluster's speeds"
        )


def _other_kinds(device: str, cluster: Cluster) -> list[str]:
    """The kinds of the cluster's devices that are not the profiled one's."""
    return sorted({group.kind for group in cluster.devices} - {device.partition(":")[0]})
