"""How large it can be: for each strategy, with and without recomputation, the most layers, samples or tokens that fit.

    measured at two sizes ─► memory of a plan at any size, by a straight line for each unit ─► the largest that fits
    (layers: one block more is as large as the blocks that there are)

Found by halving the distance between what fits and what does not; the limit itself is then checked by running. Where
memory is not what ends it (a model has positions for so many tokens, or nobody looked further), a row says what does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

from stagewright.cluster.cluster import Cluster, DeviceGroup
from stagewright.errors import UsageError
from stagewright.partition.conditions import Conditions
from stagewright.partition.split import split as split_by
from stagewright.planner.costs.measure import ModelCosts, plan_microbatch_sizes, cut_indices
from stagewright.profiler.profile import Profile
from stagewright.simulator.costs.plan_costs import plan_costs
from stagewright.simulator.memory import worker_memory
from stagewright.simulator.step_times import pipeline_times
from stagewright.simulator.topology import Topology
from stagewright.spec.plan import Mesh, Plan
from stagewright.spec.plan_rules import check_plan
from stagewright.spec.activation_checkpointing import checkpoint_by_block

__all__ = ["MEMORY", "StrategyFit", "SizeLimit", "What", "fit_strategies", "peak_bytes"]

What: TypeAlias = Literal["batch", "layers", "sequence"]
MEMORY = "memory"  # what bounds a size where nothing else does
# A model at a size: the number of layers, samples or tokens that is asked for, and the plan that it is for.
SizedModel = Callable[[Plan, int], tuple[Plan, ModelCosts]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeLimit:
    """A size that is not passed, however much memory there is."""

    size: int = 1 << 20
    """The size, and why it ends there."""
    reason: str = f"no size above {1 << 20} was tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyFit:
    """The largest size of one strategy."""

    strategy: str
    """Its name, and whether it recomputes."""
    recompute: bool
    largest: int
    """The largest size that fits; 0: none."""
    peak_bytes: int
    """The memory of the fullest worker there, and one size above; 0: there is none above."""
    above_bytes: int
    now_bytes: int
    """The memory at the size that was given, or the smallest that all strategies can have, and that size."""
    now: int
    bound: str = MEMORY
    """What keeps it from being larger: memory, or the reason of a `SizeLimit`."""
    refused: str = ""
    """Why it can't be used at all."""
    plan: Plan | None = None
    """The plan at the limit; None where none fits."""
    past: Plan | None = None
    """The plan a tenth past it; None where memory is not what ends it."""

    @property
    def past_size(self) -> int:
        """The size of `past`."""
        return self.largest + max(1, self.largest // 10)

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        del data["plan"], data["past"]
        return data


def peak_bytes(plan: Plan, measured: ModelCosts) -> int:
    """The memory of a plan's fullest worker, as it counts itself."""
    group = DeviceGroup(kind="cpu", count=plan.mesh.num_workers)
    topology = Topology(mesh=plan.mesh, cluster=Cluster(devices=(group,)))
    profile = measured.profile
    if not plan.cuts and plan.num_stages > 1:
        conditions = Conditions(num_microbatches=plan.microbatches, recompute=plan.recompute != "none")
        plan = replace(plan, cuts=split_by(profile, plan.num_stages, plan.split, conditions).cut_names)
    costs = plan_costs(
        plan,
        profile,
        topology,
        cuts=cut_indices(profile, plan.cuts),
        sizes=plan_microbatch_sizes(plan),
        tensor=measured.tensor,
        model_overheads=measured.terms,
        whole=measured.whole,
    )
    times = pipeline_times(costs)
    return max(worker_memory(costs, times, worker).counted_bytes for worker in range(plan.mesh.pipeline))


def fit_strategies(
    base: Plan,
    num_devices: int,
    limit_bytes: int,
    sized: SizedModel,
    what: What,
    *,
    now: int,
    microbatches: int,
    most: SizeLimit | None = None,
) -> list[StrategyFit]:
    """One row a strategy and way to recompute."""
    most = most or SizeLimit()
    bare = replace(base, cuts=(), stages=None, devices=())
    plans = [
        (
            strategy,
            replace(
                bare,
                mesh=mesh,
                shard=shard,
                recompute=recompute,
                microbatches=microbatches if mesh.pipeline > 1 else 1,
            ),
        )
        for strategy, mesh, shard in _strategies(num_devices)
        for recompute in ("none", "always")
    ]
    leasts = [_least(plan, what) for _, plan in plans]
    # Their memory is compared at one size, that all of them can have.
    now = max([now, *(least for least in leasts if least <= most.size)])
    return [
        _fit(strategy, plan, limit_bytes, sized, now, least, most)
        for (strategy, plan), least in zip(plans, leasts, strict=True)
    ]


def _strategies(num_devices: int) -> Sequence[tuple[str, Mesh, bool]]:
    found = [("serial", Mesh(), False)]
    if num_devices > 1:
        found += [
            ("data", Mesh(data=num_devices), False),
            ("data, sharded", Mesh(data=num_devices), True),
            ("tensor", Mesh(tensor=num_devices), False),
            ("pipeline", Mesh(pipeline=num_devices), False),
        ]
    return found


def _fit(strategy: str, plan: Plan, limit: int, sized: SizedModel, now: int, least: int, most: SizeLimit) -> StrategyFit:
    def planned(size: int) -> tuple[Plan, ModelCosts]:
        chosen, measured = sized(plan, size)
        return checkpoint_by_block(chosen, _blocks(measured.profile)), measured

    def need(size: int) -> int:
        chosen, measured = planned(size)
        check_plan(chosen)
        return peak_bytes(chosen, measured)

    row: dict[str, Any] = {"strategy": strategy, "recompute": plan.recompute != "none", "now": now}
    try:
        if least > most.size:
            raise UsageError(f"at least {least} are needed, but {most.reason}")
        at_now = need(now)
        if need(least) > limit:
            return StrategyFit(**row, largest=0, peak_bytes=0, above_bytes=need(least), now_bytes=at_now)
        good, bad = least, min(2 * least, most.size)
        while good < bad and need(bad) <= limit:
            good, bad = bad, min(2 * bad, most.size)
        is_all = good == most.size
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if need(middle) <= limit else (good, middle)
    except UsageError as error:
        return StrategyFit(**row, largest=0, peak_bytes=0, above_bytes=0, now_bytes=0, refused=str(error))
    found = StrategyFit(
        **row,
        largest=good,
        peak_bytes=need(good),
        above_bytes=0 if is_all else need(good + 1),
        now_bytes=at_now,
        bound=most.reason if is_all else MEMORY,
        plan=planned(good)[0],
    )
    return found if is_all else replace(found, past=planned(found.past_size)[0])


def _blocks(profile: Profile) -> list[str]:
    """The last unit of each block."""
    return list({unit.block: unit.name for unit in profile.units if unit.block is not None}.values())


def _least(plan: Plan, what: What) -> int:
    """The smallest batch, number of layers or of tokens that a plan can have."""
    return {"batch": plan.microbatches * plan.mesh.data, "layers": plan.num_stages, "sequence": 1}[what]
