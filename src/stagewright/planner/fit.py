"""The largest model that fits: for each strategy, without activation checkpointing, with it, and with recomputed units,
the most layers, samples or tokens.

    measured at two sizes ─► memory of a plan at any size, interpolated per unit ─► the largest that fits
    (layers: an extra block is as large as the measured ones)

The limit is found by bisection and can then be verified by running. If something other than memory ends the range (the
model's maximum sequence length, the search limit), the result names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

from stagewright.cluster.cluster import Cluster, DeviceGroup
from stagewright.errors import UsageError
from stagewright.partition.conditions import Conditions
from stagewright.partition.split import split as split_by
from stagewright.planner.costs.measure import ModelCosts, cut_indices, plan_microbatch_sizes
from stagewright.simulator.costs.plan_costs import plan_costs
from stagewright.simulator.memory import worker_memory
from stagewright.simulator.step_times import pipeline_times
from stagewright.simulator.topology import Topology
from stagewright.spec.activation_checkpointing import (
    block_ends,
    can_recompute_units,
    checkpoint_by_block,
    recomputes_stages,
)
from stagewright.spec.plan import Mesh, Plan
from stagewright.spec.plan_rules import check_plan

SizeKind: TypeAlias = Literal["batch", "layers", "sequence"]
MEMORY = "memory"  # the bound if nothing else limits the size
# Maps a plan and a number of layers, samples or tokens to the plan and model costs at that size.
SizedModel = Callable[[Plan, int], tuple[Plan, ModelCosts]]
# Maps a plan and such a size to the plan at that size, and its peak memory.
SizedMemory = Callable[[Plan, int], tuple[Plan, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeLimit:
    """The largest size regardless of memory."""

    size: int = 1 << 20
    reason: str = f"no size above {1 << 20} was tested"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyFit:
    """The largest size of one strategy."""

    strategy: str
    recompute: bool
    """Whether it uses activation checkpointing."""
    by_unit: bool = False
    """Whether only the units are recomputed that memory requires."""
    recomputed_units: tuple[str, ...] = ()
    """With `by_unit`: these units, at the largest size."""
    largest: int
    """Largest size that fits; 0: none."""
    peak_bytes: int
    """Peak memory of any worker at that size."""
    above_bytes: int
    """Peak memory one size above; 0 if there is none."""
    now_bytes: int
    """Peak memory at the size `now`."""
    now: int
    """The given size, or the smallest one that all strategies support."""
    bound: str = MEMORY
    """What limits the size: memory, or the reason of a `SizeLimit`."""
    refused: str = ""
    """Why the strategy can't be used at all."""
    plan: Plan | None = None
    """The plan at the limit; None if nothing fits."""
    past: Plan | None = None
    """The plan 10 % above the limit; None if memory is not the limit."""

    @property
    def past_size(self) -> int:
        """The size of `past`."""
        return self.largest + max(1, self.largest // 10)

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        del data["plan"], data["past"]
        return data


def peak_bytes(plan: Plan, measured: ModelCosts) -> int:
    """Predict the largest peak memory of any worker, as a run counts it."""
    group = DeviceGroup(kind="cpu", count=plan.mesh.num_workers)
    topology = Topology(mesh=plan.mesh, cluster=Cluster(devices=(group,)))
    profile = measured.profile
    if not plan.cuts and plan.num_stages > 1:
        conditions = Conditions(num_microbatches=plan.microbatches, recompute=recomputes_stages(plan))
        plan = replace(plan, cuts=split_by(profile, plan.num_stages, plan.split, conditions).cut_names)
    costs = plan_costs(
        plan,
        profile,
        topology,
        cuts=cut_indices(profile, plan.cuts),
        sizes=plan_microbatch_sizes(plan),
        tensor=measured.tensor,
        experts=measured.experts,
        model_overheads=measured.overheads,
        whole=measured.whole,
    )
    times = pipeline_times(costs)
    return max(worker_memory(costs, times, worker).counted_bytes for worker in range(plan.mesh.pipeline))


def memory_of(sized: SizedModel) -> SizedMemory:
    """Return the peak memory at each size of a measured model; without a pipeline, each block is checkpointed."""

    def memory(plan: Plan, size: int) -> tuple[Plan, int]:
        sized_plan, model = sized(plan, size)
        sized_plan = checkpoint_by_block(sized_plan, block_ends(model.profile.units))
        check_plan(sized_plan)
        return sized_plan, peak_bytes(sized_plan, model)

    return memory


def fit_strategies(
    base: Plan,
    num_devices: int,
    limit_bytes: int,
    sized: SizedMemory,
    kind: SizeKind,
    *,
    now: int,
    microbatches: int,
    limit: SizeLimit | None = None,
    by_unit: SizedMemory | None = None,
) -> list[StrategyFit]:
    """Return one result per strategy without activation checkpointing, with it, and with recomputed units.

    ``by_unit``: gives plans of any size with as few recomputed units as the limit allows; None: no such results.
    """
    limit = limit or SizeLimit()
    default = replace(base, cuts=(), stages=None, devices=(), speeds=())
    plans = [
        (
            strategy,
            replace(
                default,
                mesh=mesh,
                shard=zero == 3,
                zero=zero % 3,
                vocab_parallel=base.vocab_parallel and mesh.tensor > 1,
                sequence_parallel=base.sequence_parallel and mesh.tensor > 1,
                recompute=recompute,
                microbatches=microbatches if mesh.pipeline > 1 else 1,
            ),
        )
        for strategy, mesh, zero in _strategies(num_devices)
        for recompute in ("none", "always")
    ]
    # Memory is compared at one size that all strategies support.
    minimums = [_min_size(plan, kind) for _, plan in plans]
    now = max([now, *(minimum for minimum in minimums if minimum <= limit.size)])
    rows = []
    for strategy, plan in plans:
        minimum = _min_size(plan, kind)
        rows.append(_fit(strategy, plan, limit_bytes, sized, now, minimum, limit))
        if by_unit is not None and plan.recompute == "always":
            kept = replace(plan, recompute="none")
            if can_recompute_units(kept):
                row = _fit(strategy, kept, by_unit_limit(limit_bytes), by_unit, now, minimum, limit)
                units = (*row.plan.recomputed_units, *row.plan.attention_units) if row.plan is not None else ()
                rows.append(replace(row, recompute=True, by_unit=True, recomputed_units=units))
    return rows


def by_unit_limit(limit_bytes: int) -> int:
    """Return the memory that plans with chosen units may use.

    They fill it to the last bytes, and forecasts omit the step counters of optimizers, so a thousandth is left.
    """
    return limit_bytes - limit_bytes // 1000


def _strategies(num_devices: int) -> Sequence[tuple[str, Mesh, int]]:
    """Return the name, mesh and ZeRO stage of each strategy."""
    strategies = [("serial", Mesh(), 0)]
    if num_devices > 1:
        strategies += [
            ("data", Mesh(data=num_devices), 0),
            ("data, sharded", Mesh(data=num_devices), 3),
            ("tensor", Mesh(tensor=num_devices), 0),
            ("pipeline", Mesh(pipeline=num_devices), 0),
        ]
    return strategies


def _fit(
    strategy: str, plan: Plan, limit_bytes: int, sized: SizedMemory, now: int, minimum: int, limit: SizeLimit
) -> StrategyFit:
    def memory(size: int) -> int:
        return sized(plan, size)[1]

    row: dict[str, Any] = {"strategy": strategy, "recompute": plan.recompute != "none", "now": now}
    try:
        if minimum > limit.size:
            raise UsageError(f"at least {minimum} are needed, but {limit.reason}")
        now_bytes = memory(now)
        if memory(minimum) > limit_bytes:
            return StrategyFit(**row, largest=0, peak_bytes=0, above_bytes=memory(minimum), now_bytes=now_bytes)
        low, high = minimum, min(2 * minimum, limit.size)
        while low < high and memory(high) <= limit_bytes:
            low, high = high, min(2 * high, limit.size)
        is_limit = low == limit.size
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if memory(middle) <= limit_bytes else (low, middle)
    except UsageError as error:
        return StrategyFit(**row, largest=0, peak_bytes=0, above_bytes=0, now_bytes=0, refused=str(error))
    result = StrategyFit(
        **row,
        largest=low,
        peak_bytes=memory(low),
        above_bytes=0 if is_limit else memory(low + 1),
        now_bytes=now_bytes,
        bound=limit.reason if is_limit else MEMORY,
        plan=sized(plan, low)[0],
    )
    return result if is_limit else replace(result, past=sized(plan, result.past_size)[0])


def _min_size(plan: Plan, kind: SizeKind) -> int:
    """Return the smallest batch, number of layers or of tokens of a plan."""
    return {"batch": plan.microbatches * plan.mesh.data, "layers": plan.num_stages, "sequence": 1}[kind]
