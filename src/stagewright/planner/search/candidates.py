"""Candidates of a search: cuts, costs and lower bounds of plans, with shared results cached."""

from __future__ import annotations

from dataclasses import replace

from stagewright.cluster.cluster import Cluster
from stagewright.errors import SplitError
from stagewright.partition.conditions import Conditions
from stagewright.partition.split import split as split_by
from stagewright.planner.costs.device_speeds import with_cluster_speeds
from stagewright.planner.costs.measure import plan_microbatch_sizes
from stagewright.planner.costs.measured_plan import measured_plan_costs, profile_and_speeds
from stagewright.planner.costs.source import CostSource, plan_costs_of
from stagewright.planner.search.bounds import lower_bound_s, memory_overflow, parameter_overflow
from stagewright.planner.search.result import Candidate, RankedPlan
from stagewright.profiler.profile import amount_of
from stagewright.simulator.costs.link_codec import NO_CODEC, LinkCodec
from stagewright.simulator.costs.overheads import EngineOverheads
from stagewright.simulator.costs.plan_costs import PlanCosts
from stagewright.simulator.order_search import with_order
from stagewright.simulator.simulate import predict
from stagewright.simulator.topology import Topology
from stagewright.spec.activation_checkpointing import (
    block_ends,
    checkpoint_by_block,
    checkpoints_by_block,
    recomputes_stages,
)
from stagewright.spec.plan import Axis, Mesh, Plan
from stagewright.spec.searched_order import lacks_order
from stagewright.spec.unequal_devices import Speeds, replica_sizes

_MAX_TIMED_ACTIONS = 300_000  # of each search of an order


class CandidateBuilder:
    """Builds candidates and caches what they share."""

    def __init__(
        self, source: CostSource, cluster: Cluster, overheads: EngineOverheads, innermost: Axis, serial_s: float
    ) -> None:
        self.source, self.cluster, self.overheads, self.innermost = source, cluster, overheads, innermost
        self.serial_s = serial_s
        self.unfit: dict[str, str] = {}  # strategy → why its first plan does not fit
        self.num_unfit = 0
        self.overflowing: list[Candidate] = []
        """Candidates whose activations do not fit."""
        self._topologies: dict[tuple[Mesh, Speeds], Topology] = {}
        self._parameters: dict[int, tuple[int, int]] = {}  # all parameters and those of experts, by tensor size
        self._latest: tuple[Plan, PlanCosts] | None = None
        self._cuts: dict[tuple[int, int, bool, tuple[float, ...]], tuple[str, ...] | None] = {}

    def build(self, plan: Plan, codec: str, link_codec: LinkCodec) -> Candidate | None:
        """Build a candidate; None if it can't fit or can't be cut."""
        by_speed = with_cluster_speeds(plan, self.cluster)
        if min(replica_sizes(by_speed, plan.batch)) >= plan.microbatches:
            plan = by_speed
        topology = self.topology(plan)
        sizes = plan_microbatch_sizes(plan)
        overflow = parameter_overflow(plan, topology, self._parameter_bytes(plan.mesh, max(sizes)))
        if overflow is not None:
            self._note_unfit(plan, overflow)
            return None
        cuts = self._choose_cuts(plan, topology, max(sizes))
        if cuts is None:
            return None
        plan = replace(plan, cuts=cuts)
        if checkpoints_by_block(plan):
            plan = checkpoint_by_block(plan, block_ends(self.source.model(max(sizes), plan.mesh.tensor).profile.units))
        costs = self._shared_costs(plan, topology, link_codec)
        overflow = memory_overflow(costs)
        candidate = Candidate(plan=plan, costs=costs, bound_s=lower_bound_s(costs), codec=codec)
        if overflow is not None:
            self._note_unfit(plan, overflow)
            self.overflowing.append(candidate)
            return None
        return candidate

    def _note_unfit(self, plan: Plan, overflow: str) -> None:
        self.unfit.setdefault(plan.mesh.strategy, f"does not fit: {overflow}")
        self.num_unfit += 1

    def _parameter_bytes(self, mesh: Mesh, size: int) -> int:
        """Return the bytes of all parameters on one tensor (of most) and expert parallel worker."""
        if mesh.tensor not in self._parameters:
            model = self.source.model(size, mesh.tensor)
            parameters = [unit.parameter_bytes for unit in model.profile.units]
            self._parameters[mesh.tensor] = amount_of(parameters, 0, len(parameters) - 1), model.expert_bytes
        total, experts = self._parameters[mesh.tensor]
        return total - experts + experts // mesh.expert

    def _shared_costs(self, plan: Plan, topology: Topology, codec: LinkCodec) -> PlanCosts:
        """Reuse the latest stage costs if the plan differs only in its schedule or codec."""
        layout = replace(plan, schedule="gpipe", codec="none", placement=plan.resolved_placement)
        if self._latest is None or self._latest[0] != layout:
            self._latest = layout, self.costs(plan, topology)
        return replace(self._latest[1], plan=plan, codecs=(codec,) * (plan.num_stages - 1))

    def costs(self, plan: Plan, topology: Topology, codec: LinkCodec = NO_CODEC) -> PlanCosts:
        """Compute a plan's costs."""
        return measured_plan_costs(
            plan,
            plan_costs_of(self.source, plan),
            topology,
            codecs=[codec] * (plan.num_stages - 1),
            engine_overheads=self.overheads,
            serial_s=self.serial_s,
        )

    def topology(self, plan: Plan) -> Topology:
        """Return the topology of a plan's mesh on the cluster, with the shares of its replicas."""
        key = plan.mesh, plan.speeds
        if key not in self._topologies:
            shares = replica_sizes(plan, plan.batch) if plan.speeds else ()
            self._topologies[key] = Topology(
                mesh=plan.mesh, cluster=self.cluster, innermost=self.innermost, shares=shares
            )
        return self._topologies[key]

    def _choose_cuts(self, plan: Plan, topology: Topology, size: int) -> tuple[str, ...] | None:
        """Return the best cuts; those for another micro-batch size are reused."""
        if plan.num_stages == 1:
            return ()
        profile, stage_speeds = profile_and_speeds(plan, self.source.model(size, plan.mesh.tensor), topology)
        key = plan.num_stages, plan.mesh.tensor, recomputes_stages(plan), stage_speeds
        if key not in self._cuts:
            conditions = Conditions(speeds=stage_speeds, recompute=key[2])
            try:
                self._cuts[key] = split_by(profile, plan.num_stages, "optimal", conditions).cut_names
            except SplitError:
                self._cuts[key] = None
        return self._cuts[key]

    def rank(self, candidate: Candidate) -> RankedPlan:
        """Simulate a candidate; under schedule "searched", search its order first."""
        costs, plan = candidate.costs, candidate.plan
        if lacks_order(plan):
            costs, forecast = with_order(costs, max_timed_actions=_MAX_TIMED_ACTIONS)
        else:
            forecast = predict(costs, plan.cuts, timeline=False)
        return RankedPlan(plan=costs.plan, codec=candidate.codec, forecast=forecast, costs=costs)

    def update(self, ranked: RankedPlan) -> RankedPlan:
        """Simulate a plan again with the latest measurements."""
        assert ranked.costs is not None
        plan, codec = replace(ranked.plan, actions=()), (ranked.costs.codecs or (NO_CODEC,))[0]
        costs = self.costs(plan, self.topology(plan), codec)
        return self.rank(Candidate(plan=plan, costs=costs, bound_s=0.0, codec=ranked.codec))
