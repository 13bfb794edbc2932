"""Search for the best plan: every mesh × micro-batch × schedule × recomputation × shard, bounded, the best few exactly.

    all choices ─► rules of plans ─► a lower bound of the step ─► in its order: exact forecast, memory
                                     stop when the next bound is above the worst of the best ten
    codecs on their links ─────────► the same, until the next bound is above the best without one

One device alone and plain data parallel are always forecast, to stand beside. Sizes of micro-batches between those that
were measured lie on a line; one device's own is measured first, the best plan's at last, and that of the next one if
this makes another the best.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stagewright.cluster.cluster import Cluster
from stagewright.errors import SplitError, UsageError
from stagewright.partition.conditions import Conditions
from stagewright.partition.split import split as split_by
from stagewright.planner.baseline import microbatch_counts, baseline_plan, fastest_baseline
from stagewright.planner.costs.measure import plan_microbatch_sizes, cut_indices
from stagewright.planner.costs.source import CostSource
from stagewright.planner.search.bounds import memory_overflow, parameter_overflow, lower_bound_s, max_codec_saving_s
from stagewright.profiler.profile import amount_of
from stagewright.quantity import format_bytes
from stagewright.schedules.catalog import SCHEDULES
from stagewright.simulator.costs.plan_costs import PlanCosts, plan_costs
from stagewright.simulator.forecast import Forecast
from stagewright.simulator.costs.link_codec import NO_CODEC, LinkCodec
from stagewright.simulator.costs.overheads import EngineOverheads
from stagewright.simulator.simulate import predict
from stagewright.simulator.topology import Topology
from stagewright.simulator.what_if import explain_speedup
from stagewright.spec.plan import Axis, Mesh, Plan
from stagewright.spec.plan_rules import check_plan

__all__ = ["Candidate", "SearchResult", "RankedPlan", "search"]

_MOST_NODES = 40_000  # of a schedule that must be listed node by node
_MOST_EXACT = 1000
_LEAST_RANKED = 10  # however few are shown
_PLAIN = ("1f1b", "gpipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that might be the best."""

    plan: Plan
    """The plan, with its cuts."""
    costs: PlanCosts
    """What it costs."""
    bound_s: float
    """The least that its step can take."""
    codec: str = "none"
    """The codec on its links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """A candidate with its forecast."""

    plan: Plan
    """The plan."""
    codec: str
    """Its codec's name."""
    forecast: Forecast
    """Its forecast."""
    costs: PlanCosts
    """What it costs."""

    @property
    def reason(self) -> str:
        """What keeps it from n ×, the two largest parts."""
        parts = explain_speedup(self.costs)
        step = parts.step_s
        largest = sorted((one for one in parts.parts if one.seconds > 0), key=lambda one: -one.seconds)[:2]
        return ", ".join(f"{one.name} {one.seconds / step:.0%}" for one in largest if one.seconds > 0.01 * step) or "–"


@dataclass(slots=True, kw_only=True)
class SearchResult:
    """What a search came to."""

    best: list[RankedPlan] = field(default_factory=list)
    """The best, best first."""
    serial: RankedPlan | None = None
    """One device alone, which speed-ups are over: the quickest that fits, or else the quickest."""
    is_serial_interpolated: bool = False
    """Whether its step is by a line through smaller micro-batches, since to measure its own would take long."""
    data_parallel: RankedPlan | None = None
    """Plain data parallel over all devices, fitting or not; None where the batch is too small."""
    num_plans: int = 0
    """How many plans there were, how many were forecast exactly, how many did not fit."""
    num_exact: int = 0
    num_unfit: int = 0
    with_codec: RankedPlan | None = None
    """The quickest plan with a codec on its links, where that is quicker than the best without; None: none is."""
    losers: dict[str, str] = field(default_factory=dict)
    """For each strategy without a place among the best, why."""
    seconds: float = 0.0
    """How long it took."""


def search(
    base: Plan,
    source: CostSource,
    cluster: Cluster,
    terms: EngineOverheads | None = None,
    *,
    top: int = 10,
    schedules: Sequence[str] = tuple(SCHEDULES),
    recomputes: Sequence[str] = ("none", "always"),
    shards: Sequence[bool] = (False, True),
    codecs: Mapping[str, LinkCodec] | None = None,
    beside: Mapping[str, LinkCodec] | None = None,
    innermost: Axis = "pipeline",
    most_tensor: int = 64,
    num_devices: int | None = None,
    num_measured: int = 1,
    progress: Callable[[str], None] | None = None,
) -> SearchResult:
    """The best plans for a model and a batch on a cluster; the first `num_measured` by measurements of their own size.

    ``codecs`` are ranked as every other choice is; of those ``beside`` only the best is told, apart from the ranking.
    """
    begun = time.perf_counter()
    maker = _Maker(base, source, cluster, terms or EngineOverheads(), innermost)
    count = num_devices or cluster.num_devices
    known = dict(codecs or {"none": NO_CODEC})
    found = SearchResult()
    costs, forecast = fastest_baseline(base, source, cluster, maker.terms)
    found.serial = RankedPlan(plan=costs.plan, codec="none", forecast=forecast, costs=costs)
    found.is_serial_interpolated = source.model(max(plan_microbatch_sizes(costs.plan)), 1).profile.source == "line"
    maker.serial_s = forecast.step_s
    choices = _choices(base, source, count, schedules, recomputes, shards, known, most_tensor)
    made = (maker.candidate(plan, codec, known.get(codec, NO_CODEC)) for plan, codec in choices)
    candidates = [one for one in made if one is not None]
    if progress is not None:
        progress(f"{len(candidates)} plans, bounded in {time.perf_counter() - begun:.1f} s …")
    nearest = maker.unfit
    most = max(top, _LEAST_RANKED)
    least_s = _rank(maker, candidates, found, most, nearest)
    _sharpen(maker, found, num_measured)
    found.with_codec = _best_with_codec(maker, candidates, found.best, beside or {})
    del found.best[top:]
    found.num_plans = len(candidates) + maker.num_unfit
    found.num_unfit += maker.num_unfit
    found.data_parallel = _data_parallel(maker, base, count)
    if not found.best:
        raise UsageError(_nothing_fits(base, found.data_parallel, nearest, count))
    held = {one.plan.mesh.strategy for one in found.best}
    best_s = found.best[0].forecast.step_s
    slower = {one: f"at best {seconds / best_s:.2f} × the time of the best" for one, seconds in least_s.items()}
    found.losers = {strategy: why for strategy, why in {**nearest, **slower}.items() if strategy not in held}
    found.seconds = time.perf_counter() - begun
    return found


def _rank(
    maker: _Maker, candidates: list[Candidate], found: SearchResult, most: int, nearest: dict[str, str]
) -> dict[str, float]:
    """Forecast candidates in the order of their bounds, as long as one can still be among the best.

    Returns the least time that each strategy takes: forecast, or bounded where it was not; without what does not fit.
    """
    least_s: dict[str, float] = {}
    candidates.sort(key=lambda one: one.bound_s)
    for number, candidate in enumerate(candidates):
        strategy, seconds = candidate.plan.mesh.strategy, candidate.bound_s
        late = len(found.best) >= most and candidate.bound_s >= found.best[-1].forecast.step_s
        if not late and (number < _MOST_EXACT or not found.best):
            ranked = maker.exact(candidate)
            seconds = ranked.forecast.step_s
            found.num_exact += 1
            if not ranked.forecast.fits:
                found.num_unfit += 1
                nearest.setdefault(strategy, f"does not fit: {_needs(ranked.forecast)}")
                continue
            found.best.append(ranked)
            found.best.sort(key=lambda one: one.forecast.step_s)
            del found.best[most:]
        least_s[strategy] = min(seconds, least_s.get(strategy, math.inf))
    return least_s


def _sharpen(maker: _Maker, found: SearchResult, count: int) -> None:
    """Measure the sizes of the first plans' own micro-batches, until the first ones are such."""
    while found.best:
        sizes = dict.fromkeys((max(plan_microbatch_sizes(one.plan)), one.plan.mesh.tensor) for one in found.best[:count])
        sharpened = [one for one in sizes if maker.source.measure_size(*one)]
        if not sharpened:
            return
        again = [maker.again(one) for one in found.best]  # all: sizes beside a measured one lie on other lines now
        found.best = sorted((one for one in again if one.forecast.fits), key=lambda one: one.forecast.step_s)


def _best_with_codec(
    maker: _Maker, candidates: Sequence[Candidate], best: Sequence[RankedPlan], codecs: Mapping[str, LinkCodec]
) -> RankedPlan | None:
    """The quickest of all pipelines with one of these codecs on their links, if that is quicker than the best plan."""
    least_s = best[0].forecast.step_s if best else math.inf
    found: RankedPlan | None = None
    coded = []
    for one in candidates:
        if one.codec != "none" or one.plan.mesh.pipeline == 1 or one.bound_s - max_codec_saving_s(one.costs) >= least_s:
            continue
        for name, codec in codecs.items():
            costs = replace(one.costs, plan=replace(one.plan, codec=name), codecs=(codec,) * (one.plan.num_stages - 1))
            coded.append(Candidate(plan=costs.plan, costs=costs, bound_s=lower_bound_s(costs), codec=name))
    for candidate in sorted(coded, key=lambda one: one.bound_s):
        if candidate.bound_s >= least_s:
            break
        ranked = maker.exact(candidate)
        if ranked.forecast.fits and ranked.forecast.step_s < least_s:
            found, least_s = ranked, ranked.forecast.step_s
    return found


def _choices(
    base: Plan,
    source: CostSource,
    count: int,
    schedules: Sequence[str],
    recomputes: Sequence[str],
    shards: Sequence[bool],
    codecs: Mapping[str, LinkCodec],
    most_tensor: int,
) -> Iterator[tuple[Plan, str]]:
    """Every plan that might be worth a look."""
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    for tensor in source.tensor_sizes(min(count, most_tensor)):
        if tensor not in divisors:
            continue
        for pipeline in divisors:
            if pipeline > source.num_units or count % (tensor * pipeline):
                continue
            data = count // (tensor * pipeline)
            share = -(-base.batch // data)
            if base.batch < data:
                continue
            mesh = Mesh(data=data, tensor=tensor, pipeline=pipeline)
            for chunks in microbatch_counts(share):
                for recompute in recomputes if base.training else ("none",):
                    for schedule in schedules if pipeline > 1 else ("1f1b",):
                        for shard in shards if data > 1 and pipeline == 1 and base.training else (False,):
                            for codec in codecs if pipeline > 1 else ("none",):
                                plan = replace(
                                    base,
                                    mesh=mesh,
                                    microbatches=chunks,
                                    schedule=schedule,  # type: ignore[arg-type]
                                    recompute=recompute,  # type: ignore[arg-type]
                                    shard=shard,
                                    stages=None,
                                    cuts=(),
                                    placement="auto",
                                    devices=(),
                                    codec=codec,
                                )
                                if _allowed(plan, source.num_units):
                                    yield plan, codec


def _allowed(plan: Plan, num_units: int) -> bool:
    if plan.num_stages > num_units or plan.batch < plan.microbatches * plan.mesh.data:
        return False
    if plan.recompute != "none" and SCHEDULES[plan.schedule].splits_backward:
        return False  # a stage that runs again does its whole backward at once: the split gains nothing
    if plan.schedule not in _PLAIN and 4 * plan.num_stages * plan.microbatches > _MOST_NODES:
        return False
    try:
        check_plan(plan)
    except UsageError:
        return False
    return True


class _Maker:
    """Makes candidates, and remembers what they share."""

    def __init__(self, base: Plan, source: CostSource, cluster: Cluster, terms: EngineOverheads, innermost: Axis) -> None:
        self.base, self.source, self.cluster, self.terms, self.innermost = base, source, cluster, terms, innermost
        self.serial_s: float | None = None
        self.unfit: dict[str, str] = {}
        self.num_unfit = 0
        self._topologies: dict[Mesh, Topology] = {}
        self._parameters: dict[int, int] = {}
        self._latest: tuple[Plan, PlanCosts] | None = None
        self._cuts: dict[tuple[int, int, bool, tuple[float, ...]], tuple[str, ...] | None] = {}

    def candidate(self, plan: Plan, codec: str, costs_of: LinkCodec) -> Candidate | None:
        topology = self.topology(plan.mesh)
        sizes = plan_microbatch_sizes(plan)
        needed = parameter_overflow(plan, topology, self.parameter_bytes(plan.mesh.tensor, max(sizes)))
        if needed is not None:
            self._too_much(plan, needed)
            return None
        cuts = self.cuts(plan, topology, max(sizes))
        if cuts is None:
            return None
        plan = replace(plan, cuts=cuts)
        costs = self.shared_costs(plan, topology, sizes, costs_of)
        needed = memory_overflow(costs)
        if needed is not None:
            self._too_much(plan, needed)
            return None
        return Candidate(plan=plan, costs=costs, bound_s=lower_bound_s(costs), codec=codec)

    def _too_much(self, plan: Plan, needed: str) -> None:
        self.unfit.setdefault(plan.mesh.strategy, f"does not fit: {needed}")
        self.num_unfit += 1

    def parameter_bytes(self, tensor: int, size: int) -> int:
        """All parameters, as one worker of a tensor axis has them."""
        if tensor not in self._parameters:
            units = self.source.model(size, tensor).profile.units
            self._parameters[tensor] = amount_of([unit.parameter_bytes for unit in units], 0, len(units) - 1)
        return self._parameters[tensor]

    def shared_costs(self, plan: Plan, topology: Topology, sizes: Sequence[int], codec: LinkCodec) -> PlanCosts:
        """Schedules that place the same stages, and codecs, differ in the order and in messages alone."""
        layout = replace(plan, schedule="gpipe", codec="none", placement=plan.resolved_placement)
        if self._latest is None or self._latest[0] != layout:
            self._latest = layout, self.costs(plan, topology, sizes)
        return replace(self._latest[1], plan=plan, codecs=(codec,) * (plan.num_stages - 1))

    def costs(self, plan: Plan, topology: Topology, sizes: Sequence[int], codec: LinkCodec = NO_CODEC) -> PlanCosts:
        measured = self.source.model(max(sizes), plan.mesh.tensor)
        return plan_costs(
            plan,
            measured.profile,
            topology,
            cuts=cut_indices(measured.profile, plan.cuts),
            sizes=sizes,
            tensor=measured.tensor,
            model_overheads=measured.terms,
            engine_overheads=self.terms,
            codecs=[codec] * (plan.num_stages - 1),
            whole=measured.whole,
            serial_s=self.serial_s,
        )

    def topology(self, mesh: Mesh) -> Topology:
        if mesh not in self._topologies:
            self._topologies[mesh] = Topology(mesh=mesh, cluster=self.cluster, innermost=self.innermost)
        return self._topologies[mesh]

    def cuts(self, plan: Plan, topology: Topology, size: int) -> tuple[str, ...] | None:
        """The best cuts for so many stages; those of another size of micro-batch are taken as well."""
        if plan.num_stages == 1:
            return ()
        speeds = topology.speeds()
        by_stage = tuple(speeds[worker] for worker in plan.stage_workers)
        key = plan.num_stages, plan.mesh.tensor, plan.recompute != "none", by_stage
        if key not in self._cuts:
            profile = self.source.model(size, plan.mesh.tensor).profile
            conditions = Conditions(speeds=by_stage, recompute=key[2])
            try:
                self._cuts[key] = split_by(profile, plan.num_stages, "optimal", conditions).cut_names
            except SplitError:
                self._cuts[key] = None
        return self._cuts[key]

    def again(self, one: RankedPlan) -> RankedPlan:
        """The same plan, by what is known of its size by now."""
        costs = self.costs(
            one.plan, self.topology(one.plan.mesh), plan_microbatch_sizes(one.plan), (one.costs.codecs or (NO_CODEC,))[0]
        )
        return self.exact(Candidate(plan=one.plan, costs=costs, bound_s=0.0, codec=one.codec))

    def exact(self, candidate: Candidate) -> RankedPlan:
        return RankedPlan(
            plan=candidate.plan,
            codec=candidate.codec,
            forecast=predict(candidate.costs, candidate.plan.cuts, timeline=False),
            costs=candidate.costs,
        )


def _data_parallel(maker: _Maker, base: Plan, count: int) -> RankedPlan | None:
    """Replicas alone: whole if they fit, else with the fewest micro-batches that do, else as they are."""
    if base.batch < count:
        return None
    found: RankedPlan | None = None
    for chunks in microbatch_counts(-(-base.batch // count)):
        plan = baseline_plan(base, Mesh(data=count), chunks)
        try:
            check_plan(plan)
        except UsageError:
            continue
        topology = maker.topology(plan.mesh)
        costs = maker.costs(plan, topology, plan_microbatch_sizes(plan))
        found = maker.exact(Candidate(plan=plan, costs=costs, bound_s=0.0))
        if found.forecast.fits:
            return found
    return found


def _needs(forecast: Forecast) -> str:
    worst = max(forecast.workers, key=lambda one: one.memory.peak_bytes - (one.memory_limit_bytes or 0))
    return f"{format_bytes(worst.memory.peak_bytes)} of {format_bytes(worst.memory_limit_bytes or 0)}"


def _nothing_fits(base: Plan, data_parallel: RankedPlan | None, nearest: Mapping[str, str], count: int) -> str:
    tried = "; ".join(f"{strategy} {why}" for strategy, why in nearest.items())
    if not tried and data_parallel is None:
        return (
            f"a batch of {base.batch} gives work to no mesh of {count} devices: use --batch {count} or more, or fewer "
            "devices"
        )
    return f"no plan for a batch of {base.batch} fits on {count} devices ({tried}): use a smaller batch or more memory"
