"""One device alone, which speed-ups are over: the same batch in as many micro-batches as is quickest there.

all numbers of micro-batches by what is known ─► the quickest that fits ─► measured at its size ─► still the quickest?
"""

from __future__ import annotations

from dataclasses import replace

from stagewright.cluster.cluster import Cluster
from stagewright.planner.costs.measure import plan_microbatch_sizes
from stagewright.planner.costs.source import CostSource
from stagewright.simulator.costs.plan_costs import PlanCosts, plan_costs
from stagewright.simulator.forecast import Forecast
from stagewright.simulator.costs.overheads import EngineOverheads
from stagewright.simulator.simulate import predict
from stagewright.simulator.topology import Topology
from stagewright.spec.plan import Mesh, Plan

__all__ = ["microbatch_counts", "baseline_plan", "fastest_baseline"]

_MOST_CHUNKS = 1024
_LEAST_GAIN = 0.05  # for which another size is measured too


def fastest_baseline(
    base: Plan, source: CostSource, cluster: Cluster, terms: EngineOverheads | None = None
) -> tuple[PlanCosts, Forecast]:
    """A plan's batch on the fastest device of a cluster: the quickest way that fits, or else the quickest."""
    fastest = max(cluster.devices, key=lambda one: one.speed)
    alone = Topology(mesh=Mesh(), cluster=replace(cluster, devices=(replace(fastest, count=1, hosts=1),)))
    plans = [baseline_plan(base, Mesh(), chunks) for chunks in microbatch_counts(base.batch)]
    best = _quickest(plans, source, alone, terms)
    # What does not fit can't be measured either.
    while best[1].fits and source.measure_size(max(plan_microbatch_sizes(best[0].plan)), 1):
        measured, best = _alone(best[0].plan, source, alone, terms), _quickest(plans, source, alone, terms)
        if measured[1].fits and best[1].step_s > (1 - _LEAST_GAIN) * measured[1].step_s:
            return measured
    return best


def _quickest(
    plans: list[Plan], source: CostSource, alone: Topology, terms: EngineOverheads | None
) -> tuple[PlanCosts, Forecast]:
    found = [_alone(plan, source, alone, terms) for plan in plans]
    return min(found, key=lambda one: (not one[1].fits, one[1].step_s))


def _alone(plan: Plan, source: CostSource, alone: Topology, terms: EngineOverheads | None) -> tuple[PlanCosts, Forecast]:
    sizes = plan_microbatch_sizes(plan)
    measured = source.model(max(sizes), 1)
    costs = plan_costs(
        plan, measured.profile, alone, cuts=[], sizes=sizes, model_overheads=measured.terms, engine_overheads=terms
    )
    forecast = predict(costs, timeline=False)
    return replace(costs, serial_s=forecast.step_s), replace(forecast, serial_s=forecast.step_s, speedup=1.0)


def microbatch_counts(share: int) -> list[int]:
    """Numbers of micro-batches: halves of the share, down to single samples."""
    found, size = [], share
    while size >= 1:
        chunks = -(-share // size)
        if chunks <= _MOST_CHUNKS and chunks not in found:
            found.append(chunks)
        if size == 1:
            break
        size = -(-size // 2)
    return found


def baseline_plan(base: Plan, mesh: Mesh, chunks: int) -> Plan:
    """Without anything that could be chosen beside."""
    return replace(
        base,
        mesh=mesh,
        microbatches=chunks,
        schedule="1f1b",
        recompute="none",
        shard=False,
        stages=None,
        cuts=(),
        placement="auto",
        devices=(),
        codec="none",
        codec_backward=None,
    )
