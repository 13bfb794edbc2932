"""The single-device baseline of speed-ups: the same batch with the number of micro-batches that is fastest there.

all numbers of micro-batches, interpolated ─► the fastest that fits ─► measure its size ─► still the fastest?
"""

from __future__ import annotations

from dataclasses import replace

from stagewright.cluster.cluster import Cluster
from stagewright.planner.costs.measure import plan_microbatch_sizes
from stagewright.planner.costs.source import CostSource
from stagewright.simulator.costs.overheads import EngineOverheads
from stagewright.simulator.costs.plan_costs import PlanCosts, plan_costs
from stagewright.simulator.forecast import Forecast
from stagewright.simulator.simulate import predict
from stagewright.simulator.topology import Topology
from stagewright.spec.plan import Mesh, Plan

_MAX_MICROBATCHES = 1024
_MIN_GAIN = 0.05  # worth measuring another size


def fastest_baseline(
    base: Plan, source: CostSource, cluster: Cluster, overheads: EngineOverheads | None = None
) -> tuple[PlanCosts, Forecast]:
    """Find the fastest baseline on the cluster's fastest device that fits, or else the fastest."""
    fastest = max(cluster.devices, key=lambda group: group.speed)
    device = Topology(mesh=Mesh(), cluster=replace(cluster, devices=(replace(fastest, count=1, hosts=1),)))
    plans = [baseline_plan(base, Mesh(), count) for count in microbatch_counts(base.batch)]
    best = _fastest(plans, source, device, overheads)
    # A plan that does not fit can't be measured.
    while best[1].fits and source.measure_size(max(plan_microbatch_sizes(best[0].plan)), 1):
        measured = _predict(best[0].plan, source, device, overheads)
        best = _fastest(plans, source, device, overheads)
        if measured[1].fits and best[1].step_s > (1 - _MIN_GAIN) * measured[1].step_s:
            return measured
    return best


def _fastest(
    plans: list[Plan], source: CostSource, device: Topology, overheads: EngineOverheads | None
) -> tuple[PlanCosts, Forecast]:
    forecasts = [_predict(plan, source, device, overheads) for plan in plans]
    return min(forecasts, key=lambda pair: (not pair[1].fits, pair[1].step_s))


def _predict(
    plan: Plan, source: CostSource, device: Topology, overheads: EngineOverheads | None
) -> tuple[PlanCosts, Forecast]:
    sizes = plan_microbatch_sizes(plan)
    model = source.model(max(sizes), 1)
    costs = plan_costs(
        plan, model.profile, device, cuts=[], sizes=sizes, model_overheads=model.overheads, engine_overheads=overheads
    )
    forecast = predict(costs, timeline=False)
    return replace(costs, serial_s=forecast.step_s), replace(forecast, serial_s=forecast.step_s, speedup=1.0)


def microbatch_counts(num_samples: int) -> list[int]:
    """Return numbers of micro-batches: the samples halved repeatedly, down to single samples."""
    counts, size = [], num_samples
    while size >= 1:
        count = -(-num_samples // size)
        if count <= _MAX_MICROBATCHES and count not in counts:
            counts.append(count)
        if size == 1:
            break
        size = -(-size // 2)
    return counts


def baseline_plan(base: Plan, mesh: Mesh, microbatches: int) -> Plan:
    """Return the plan on another mesh, with every other choice at its default."""
    return replace(
        base,
        mesh=mesh,
        microbatches=microbatches,
        schedule="1f1b",
        actions=(),
        recompute="none",
        offload="none",
        shard=False,
        fsdp_shards=None,
        fsdp_gather="auto",
        zero=0,
        vocab_parallel=False,
        sequence_parallel=False,
        optimizer_in_backward=False,
        stages=None,
        cuts=(),
        placement="auto",
        devices=(),
        speeds=(),
        codec="none",
        codec_backward=None,
    )
