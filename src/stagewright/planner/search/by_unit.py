"""Plans that recompute or offload units by name: the cut and the units solved together under the memory limit.

    plan that keeps everything ─► does not fit ─► `partition.unit_memory` ─► forecast ─► fits, or solve again
                                                                             with what the forecast needs more or less

The solver's memory is simpler than that of a forecast, which counts what gradients and activations share over time. Its
limit is therefore corrected by the forecast a few times.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stagewright.cluster.cluster import Cluster, DeviceGroup
from stagewright.partition.unit_memory import MemoryPlan, StageLimit, TreatmentCosts, UnitCosts, solve
from stagewright.planner.costs.measure import ModelCosts, plan_microbatch_sizes
from stagewright.planner.fit import SizedMemory, SizedModel, by_unit_limit, peak_bytes
from stagewright.planner.search.bounds import held_per_parameter, unsharded_gradients
from stagewright.planner.search.candidates import CandidateBuilder
from stagewright.planner.search.result import Candidate, RankedPlan
from stagewright.profiler.profile import UnitProfile
from stagewright.simulator.costs.link_codec import NO_CODEC, LinkCodec
from stagewright.simulator.costs.overheads import EngineOverheads
from stagewright.simulator.costs.stage_costs import time_scales
from stagewright.simulator.forecast import Forecast
from stagewright.spec.activation_checkpointing import can_offload, can_recompute_attention
from stagewright.spec.plan import OF_ATTENTION, Plan
from stagewright.spec.plan_rules import check_plan

_MAX_ROUNDS = 6
_UNLIMITED = 1 << 60
_MAX_CUTS = 256
"""Ways to cut a model up to which the least memory of all is found."""
_MAX_UNITS = 64
"""Units up to which `memory_by_unit` solves which to recompute."""


def recompute_units(
    builder: CandidateBuilder, plan: Plan, codec: str = "none", link_codec: LinkCodec = NO_CODEC
) -> RankedPlan | None:
    """Return the fastest plan found with cuts and recomputed or offloaded units that fit; None if there is none.

    Units are offloaded where the cluster states the rate between devices and their hosts.
    """
    topology, sizes = builder.topology(plan), plan_microbatch_sizes(plan)
    limits = [
        min((size for size in (device, plan.memory_bytes) if size is not None), default=_UNLIMITED)
        for device in topology.memory_limits()
    ]
    model = builder.source.model(max(sizes), plan.mesh.tensor)
    names = [unit.name for unit in model.profile.units]
    host = builder.cluster.links.host if can_offload(plan) else None
    units, speeds = solver_units(plan, model, can_offload=host is not None), topology.speeds()

    def rank(cuts: tuple[str, ...], recomputed: Sequence[str], offloaded: Sequence[str]) -> RankedPlan:
        solved = replace(plan, cuts=cuts, recompute=tuple(recomputed) or "none", offload=tuple(offloaded) or "none")
        costs = builder.costs(solved, topology, link_codec)
        return builder.rank(Candidate(plan=solved, costs=costs, bound_s=0.0, codec=codec))

    corrected, seen = list(limits), set[MemoryPlan]()
    best: RankedPlan | None = None
    for _ in range(_MAX_ROUNDS):
        stages = [
            StageLimit(
                memory_bytes=max(1, size),
                in_flight=in_flight(plan, worker),
                speed=speeds[worker],
                host_bytes_per_s=math.inf if host is None else host.bandwidth_bytes_per_s,
            )
            for worker, size in enumerate(corrected)
        ]
        found = solve(units, stages)
        if found is None or found in seen:
            break
        seen.add(found)
        ranked = rank(
            tuple(names[end] for end in found.ends[:-1]),
            [
                *(names[index] for index in found.recomputed),
                *(names[index] + OF_ATTENTION for index in found.units("attention")),
            ],
            [names[index] for index in found.units("offload")],
        )
        corrected = _correct(limits, found, ranked)
        if ranked.forecast.fits and (best is None or ranked.forecast.step_s < best.forecast.step_s):
            best = ranked
    return None if best is None else _keep_more(best, model, rank)


def _keep_more(
    best: RankedPlan, model: ModelCosts, rank: Callable[[tuple[str, ...], Sequence[str], Sequence[str]], RankedPlan]
) -> RankedPlan:
    """Keep the activations of units that need no recomputation or offload by the forecast, the most expensive first."""
    cost_s = {unit.name: unit.forward.median_s for unit in model.profile.units}
    for unit in model.profile.units:
        if unit.attention is not None:
            cost_s[unit.name + OF_ATTENTION] = unit.attention.recompute.median_s
    # Of equal units the last: when the first is recomputed, the activations of all others are freed.
    recomputed = _entries(best.plan.recompute)
    by_cost = sorted(recomputed, key=lambda name: (-cost_s[name], -recomputed.index(name)))
    for name in (*by_cost, *reversed(_entries(best.plan.offload))):
        others = [
            [other for other in _entries(key) if other != name] for key in (best.plan.recompute, best.plan.offload)
        ]
        fewer = rank(best.plan.cuts, *others)
        if fewer.forecast.fits and fewer.forecast.step_s <= best.forecast.step_s:
            best = fewer
    return best


def _entries(value: object) -> tuple[str, ...]:
    """Return the units that a key of a plan names."""
    return tuple(map(str, value)) if isinstance(value, tuple) else ()


def solver_units(plan: Plan, model: ModelCosts, *, can_offload: bool = False) -> list[UnitCosts]:
    """Return the units of a profile as the solver sees them."""
    has_attention = can_recompute_attention(plan)
    forward_scale, backward_scale = time_scales(model.profile)
    copies = held_per_parameter(plan)
    if plan.microbatches > 1:  # else gradients take the place of activations
        copies += unsharded_gradients(plan)
    units = []
    for index, unit in enumerate(model.profile.units):
        forward_s = unit.forward.median_s * forward_scale
        loss_bytes = model.overheads.loss_kept_bytes if index == len(model.profile.units) - 1 else 0
        units.append(
            UnitCosts(
                time_s=forward_s + unit.backward_s * backward_scale,
                forward_s=forward_s,
                saved_bytes=unit.saved_bytes.added(0) + loss_bytes,
                input_bytes=unit.recompute_saved_bytes + loss_bytes,
                fixed_bytes=int(unit.parameter_bytes.added(0) * copies) + unit.buffer_bytes,
                attention=_attention_costs(unit, forward_scale) if has_attention else None,
                can_offload=can_offload,
            )
        )
    return units


def _attention_costs(unit: UnitProfile, scale: float) -> TreatmentCosts | None:
    """Return what recomputation of a unit's attention alone saves and costs."""
    attention = unit.attention
    if attention is None:
        return None
    return TreatmentCosts(
        gain_bytes=unit.saved_bytes.added(0) - attention.saved_bytes.added(0),
        peak_bytes=max(0, attention.recomputed_bytes - attention.later_bytes),
        recompute_s=attention.recompute.median_s * scale,
    )


def in_flight(plan: Plan, worker: int) -> int:
    """Return the micro-batches whose activations a worker holds at once."""
    if plan.mesh.pipeline == 1:
        return 1
    return plan.microbatches if plan.schedule == "gpipe" else min(plan.microbatches, plan.mesh.pipeline - worker)


def _correct(limits: Sequence[int], found: MemoryPlan, ranked: RankedPlan) -> list[int]:
    """Return the solver's limits: the real ones, less what the forecast counts above the solver."""
    assert isinstance(ranked.forecast, Forecast)
    peaks = [worker.memory.counted_bytes for worker in ranked.forecast.workers]
    return [
        limit - (peak - counted) if limit < _UNLIMITED else limit
        for limit, peak, counted in zip(limits, peaks, found.stage_bytes, strict=True)
    ]


def memory_by_unit(sized: SizedModel, limit_bytes: int) -> SizedMemory:
    """Return the plan at each size with as few recomputed units as the limit allows, and its peak memory.

    Where the solver finds nothing that fits, the plan with the least memory is returned.
    """
    limit_bytes = by_unit_limit(limit_bytes)

    def memory(plan: Plan, size: int) -> tuple[Plan, int]:
        sized_plan, model = sized(plan, size)
        check_plan(sized_plan)
        peak = peak_bytes(sized_plan, model)
        if peak <= limit_bytes:
            return sized_plan, peak
        names = tuple(unit.name for unit in model.profile.units)
        if len(names) <= _MAX_UNITS:
            group = DeviceGroup(kind="cpu", count=plan.mesh.num_workers)
            builder = CandidateBuilder(
                _OneSize(model), Cluster(devices=(group,)), EngineOverheads(), "pipeline", serial_s=1.0
            )
            found = recompute_units(builder, replace(sized_plan, memory_bytes=limit_bytes))
            if found is not None:
                chosen = replace(found.plan, memory_bytes=sized_plan.memory_bytes)
                return chosen, peak_bytes(chosen, model)
        return _recompute_all(sized_plan, model, limit_bytes)

    return memory


def _recompute_all(plan: Plan, model: ModelCosts, limit_bytes: int) -> tuple[Plan, int]:
    """Return the plan with the least memory, of all cuts if these are few, and its peak.

    Where it fits, the activations of units that need no recomputation are kept.
    """
    names = tuple(unit.name for unit in model.profile.units)
    num_cuts = plan.num_stages - 1
    is_few = math.comb(len(names) - 1, num_cuts) <= _MAX_CUTS
    cuts = list(itertools.combinations(names[:-1], num_cuts)) if is_few else [plan.cuts]

    def peak_of(chosen: Plan) -> tuple[Plan, int]:
        return chosen, peak_bytes(chosen, model)

    best, peak = min((peak_of(replace(plan, cuts=cut, recompute=names)) for cut in cuts), key=lambda pair: pair[1])
    for name in reversed(names) if peak <= limit_bytes else ():
        kept = tuple(other for other in best.recomputed_units if other != name)
        fewer, needed = peak_of(replace(best, recompute=kept or "none"))
        if needed <= limit_bytes:
            best, peak = fewer, needed
    return best, peak


@dataclass(frozen=True, slots=True)
class _OneSize:
    """A cost source that knows one micro-batch size."""

    costs: ModelCosts

    @property
    def num_units(self) -> int:
        return len(self.costs.profile.units)

    @property
    def num_experts(self) -> int:
        return 1

    def tensor_sizes(self, largest: int) -> list[int]:
        return [self.costs.num_tensor]

    def measure_size(self, size: int, tensor: int) -> bool:
        return False

    def model(self, size: int, tensor: int) -> ModelCosts:
        return self.costs
