"""Search for the best plan: every mesh × micro-batch × schedule × recomputation × shard, bounded, the best few exactly.

    all choices ─► rules of plans ─► a lower bound of the step ─► in its order: exact forecast, memory
                                     stop when the next bound is above the worst of the best ten
    the best meshes under GPipe or 1F1B ─► the same with the other schedules, exactly

The bound of worker w: what it computes, after the forwards before it and before the backwards behind them. It never
exceeds the forecast, so that nothing better is thrown away. One device alone and plain data parallel are always
forecast, to stand beside. Sizes of micro-batches between those that were measured lie on a line; one device's own is
measured first, the best plan's at last, and that of the next one if this makes another the best.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stagewright.cluster.cluster import Cluster
from stagewright.errors import SplitError, UsageError
from stagewright.forecast.costs import PlanCosts, plan_costs
from stagewright.forecast.link_codec import PLAIN, LinkCodec
from stagewright.forecast.memory import STATES
from stagewright.forecast.predict import optimizer_s, predict
from stagewright.forecast.terms import EngineTerms
from stagewright.forecast.topology import Topology
from stagewright.forecast.value import Forecast
from stagewright.forecast.what_if import explain_parts
from stagewright.plan.check import check_plan
from stagewright.plan.schedules import SCHEDULES
from stagewright.plan.value import Axis, Mesh, Plan
from stagewright.planner.measure import chunk_sizes, cut_places
from stagewright.planner.serial import microbatch_numbers, plain_plan, quickest_serial
from stagewright.planner.source import Source
from stagewright.quantity import format_bytes
from stagewright.split.compare import split as split_by
from stagewright.split.conditions import Conditions

__all__ = ["Candidate", "Found", "Ranked", "search"]

_MOST_NODES = 40_000  # of a schedule that must be listed node by node
_MOST_EXACT = 200
_MOST_MESHES = 3  # on which schedules beyond GPipe and 1F1B are tried
_LEAST_RANKED = 10  # however few are shown
_PLAIN = ("1f1b", "gpipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that might be the best."""

    # The plan, with its cuts.
    plan: Plan
    # What it costs.
    costs: PlanCosts
    # The least that its step can take.
    bound_s: float
    # The codec on its links.
    codec: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A candidate with its forecast."""

    # The plan.
    plan: Plan
    # Its codec's name.
    codec: str
    # Its forecast.
    forecast: Forecast
    # What it costs.
    costs: PlanCosts

    @property
    def reason(self) -> str:
        """What keeps it from n ×, the two largest parts."""
        parts = explain_parts(self.costs)
        step = parts.step_s
        largest = sorted((one for one in parts.parts if one.seconds > 0), key=lambda one: -one.seconds)[:2]
        return ", ".join(f"{one.name} {one.seconds / step:.0%}" for one in largest if one.seconds > 0.01 * step) or "–"


@dataclass(slots=True, kw_only=True)
class Found:
    """What a search came to."""

    # The best, best first.
    best: list[Ranked] = field(default_factory=list)
    # One device alone, which speed-ups are over: the quickest that fits, or else the quickest.
    serial: Ranked | None = None
    # Whether its step is by a line through smaller micro-batches, since to measure its own would take long.
    is_serial_by_line: bool = False
    # Plain data parallel over all devices, fitting or not; None where the batch is too small.
    data_parallel: Ranked | None = None
    # How many plans there were, how many were forecast exactly, how many did not fit.
    num_plans: int = 0
    num_exact: int = 0
    num_unfit: int = 0
    # For each strategy without a place among the best, why.
    losers: dict[str, str] = field(default_factory=dict)
    # How long it took.
    seconds: float = 0.0


def search(
    base: Plan,
    source: Source,
    cluster: Cluster,
    terms: EngineTerms | None = None,
    *,
    top: int = 10,
    schedules: Sequence[str] = ("1f1b", "gpipe", "interleaved", "zbv"),
    recomputes: Sequence[str] = ("none", "always"),
    shards: Sequence[bool] = (False, True),
    codecs: Mapping[str, LinkCodec] | None = None,
    innermost: Axis = "pipeline",
    most_tensor: int = 64,
    num_devices: int | None = None,
    num_sharp: int = 1,
    progress: Callable[[str], None] | None = None,
) -> Found:
    """The best plans for a model and a batch on a cluster; the first `num_sharp` by measurements of their own size."""
    begun = time.perf_counter()
    maker = _Maker(base, source, cluster, terms or EngineTerms(), innermost)
    count = num_devices or cluster.num_devices
    known = dict(codecs or {"none": PLAIN})
    found = Found()
    plain = [name for name in schedules if name in _PLAIN]
    others = [name for name in schedules if name not in _PLAIN]
    costs, forecast = quickest_serial(base, source, cluster, maker.terms)
    found.serial = Ranked(plan=costs.plan, codec="none", forecast=forecast, costs=costs)
    found.is_serial_by_line = source.model(max(chunk_sizes(costs.plan)), 1).profile.source == "line"
    maker.serial_s = forecast.step_s
    choices = _choices(base, source, count, plain or list(_PLAIN), recomputes, shards, known, most_tensor)
    candidates = [one for plan, codec in choices if (one := maker.candidate(plan, codec, known[codec])) is not None]
    if progress is not None:
        progress(f"{len(candidates)} plans, bounded in {time.perf_counter() - begun:.1f} s …")
    nearest = maker.unfit
    most = max(top, _LEAST_RANKED)
    least_s = _rank(maker, candidates, found, most, nearest)
    ranked = [one.plan for one in found.best[:_LEAST_RANKED] if one.plan.mesh.pipeline > 1]
    pipelines = dict.fromkeys(replace(plan, schedule="1f1b", cuts=()) for plan in ranked)
    if not plain:  # the others stand on the meshes of these, which themselves were not asked for
        found.best = [one for one in found.best if one.plan.mesh.pipeline == 1]
    more = []
    for plan in list(pipelines)[:_MOST_MESHES]:
        for name in others:
            other, codec = replace(plan, schedule=name), plan.codec_of(0)  # type: ignore[arg-type]
            if _allowed(other, source.num_units):
                candidate = maker.candidate(other, codec, known[codec])
                more += [candidate] if candidate is not None else []
    for strategy, seconds in _rank(maker, more, found, most, nearest).items():
        least_s[strategy] = min(seconds, least_s.get(strategy, math.inf))
    _sharpen(maker, found, num_sharp)
    del found.best[top:]
    found.num_plans = len(candidates) + len(more) + maker.num_unfit
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
    maker: _Maker, candidates: list[Candidate], found: Found, most: int, nearest: dict[str, str]
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


def _sharpen(maker: _Maker, found: Found, count: int) -> None:
    """Measure the sizes of the first plans' own micro-batches, until the first ones are such."""
    while found.best:
        sizes = dict.fromkeys((max(chunk_sizes(one.plan)), one.plan.mesh.tensor) for one in found.best[:count])
        sharpened = [one for one in sizes if maker.source.sharpen(*one)]
        if not sharpened:
            return
        again = [maker.again(one) for one in found.best]  # all: sizes beside a measured one lie on other lines now
        found.best = sorted((one for one in again if one.forecast.fits), key=lambda one: one.forecast.step_s)


def _choices(
    base: Plan,
    source: Source,
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
            for chunks in microbatch_numbers(share):
                for schedule in schedules if pipeline > 1 else ("1f1b",):
                    for recompute in recomputes if base.training else ("none",):
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

    def __init__(self, base: Plan, source: Source, cluster: Cluster, terms: EngineTerms, innermost: Axis) -> None:
        self.base, self.source, self.cluster, self.terms, self.innermost = base, source, cluster, terms, innermost
        self.serial_s: float | None = None
        self.unfit: dict[str, str] = {}
        self.num_unfit = 0
        self._topologies: dict[Mesh, Topology] = {}
        self._cuts: dict[tuple[int, int, bool, tuple[float, ...]], tuple[str, ...] | None] = {}

    def candidate(self, plan: Plan, codec: str, costs_of: LinkCodec) -> Candidate | None:
        topology = self.topology(plan.mesh)
        sizes = chunk_sizes(plan)
        cuts = self.cuts(plan, topology, max(sizes))
        if cuts is None:
            return None
        plan = replace(plan, cuts=cuts)
        costs = self.same_serial(self.costs(plan, topology, sizes, costs_of))
        needed = least_memory(costs)
        if needed is not None:
            self.unfit.setdefault(plan.mesh.strategy, f"does not fit: {needed}")
            self.num_unfit += 1
            return None
        return Candidate(plan=plan, costs=costs, bound_s=lower_bound_s(costs), codec=codec)

    def same_serial(self, costs: PlanCosts) -> PlanCosts:
        return costs if self.serial_s is None else replace(costs, serial_s=self.serial_s)

    def costs(self, plan: Plan, topology: Topology, sizes: Sequence[int], codec: LinkCodec = PLAIN) -> PlanCosts:
        measured = self.source.model(max(sizes), plan.mesh.tensor)
        return plan_costs(
            plan,
            measured.profile,
            topology,
            cuts=cut_places(measured.profile, plan.cuts),
            sizes=sizes,
            tensor=measured.tensor,
            model_terms=measured.terms,
            engine_terms=self.terms,
            codecs=[codec] * (plan.num_stages - 1),
            whole=measured.whole,
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

    def again(self, one: Ranked) -> Ranked:
        """The same plan, by what is known of its size by now."""
        costs = self.costs(
            one.plan, self.topology(one.plan.mesh), chunk_sizes(one.plan), (one.costs.codecs or (PLAIN,))[0]
        )
        candidate = Candidate(plan=one.plan, costs=self.same_serial(costs), bound_s=0.0, codec=one.codec)
        return self.exact(candidate)

    def exact(self, candidate: Candidate) -> Ranked:
        return Ranked(
            plan=candidate.plan,
            codec=candidate.codec,
            forecast=predict(candidate.costs, candidate.plan.cuts, timeline=False),
            costs=candidate.costs,
        )


def lower_bound_s(costs: PlanCosts) -> float:
    """The least that a step can take, whatever the schedule does.

    Of each worker: the forwards before its first stage, all that it computes, and then its optimiser's step or the
    backwards behind it and the first worker's. Where backwards are split, it may do its own second halves meanwhile.
    """
    plan = costs.plan
    chunks, share = sum(costs.shares), min(costs.shares)
    forwards = backwards = 0.0
    busy = [0.0] * plan.mesh.pipeline
    around: dict[int, tuple[float, float]] = {}
    for stage in costs.stages:
        forward = stage.forward_s + stage.tensor_forward_s
        backward = stage.backward_input_s + stage.backward_weight_s + stage.tensor_backward_s if plan.training else 0.0
        again = forward if plan.training and plan.recompute == "always" else 0.0
        busy[stage.worker] += chunks * (forward + backward + again)
        around.setdefault(stage.worker, (forwards, backwards))
        forwards += share * forward
        backwards += share * backward
    if not plan.training:  # steps follow each other without a gap
        return max(busy)
    steps = [optimizer_s(costs, worker) for worker in range(plan.mesh.pipeline)]
    first = costs.stages[0].worker
    ends = [fill + busy[worker] + steps[worker] for worker, (fill, _) in around.items()]
    if not SCHEDULES[plan.schedule].splits_backward:
        ends += [fill + busy[worker] + drain + steps[first] for worker, (fill, drain) in around.items()]
    return max(ends)


def least_memory(costs: PlanCosts) -> str | None:
    """What a worker needs at the very least, where its device has less; None where it may fit."""
    plan = costs.plan
    states = STATES[plan.optimizer.name] + (plan.optimizer.momentum > 0) if plan.training else 0
    divide = plan.mesh.data if plan.shard else 1
    chunks = len(costs.shares)
    for worker, limit in enumerate(costs.topology.memory_limits()):
        limit = min((one for one in (limit, plan.memory_bytes) if one is not None), default=None)
        if limit is None:
            continue
        needed = 0.0
        for index, stage in enumerate(costs.stages):
            if stage.worker != worker:
                continue
            held = chunks if plan.schedule == "gpipe" else min(chunks, plan.mesh.pipeline - worker)
            held = held if plan.schedule in _PLAIN else 1
            kept = stage.input_bytes if costs.recomputes(index) else stage.kept_bytes
            needed += stage.parameter_bytes * (1 + states) / divide
            needed += held * kept * min(costs.shares) if plan.training else 0
        if needed > limit:
            return f"{format_bytes(needed)} of {format_bytes(limit)}"
    return None


def _data_parallel(maker: _Maker, base: Plan, count: int) -> Ranked | None:
    """Replicas alone: whole if they fit, else with the fewest micro-batches that do, else as they are."""
    if base.batch < count:
        return None
    found: Ranked | None = None
    for chunks in microbatch_numbers(-(-base.batch // count)):
        plan = plain_plan(base, Mesh(data=count), chunks)
        try:
            check_plan(plan)
        except UsageError:
            continue
        topology = maker.topology(plan.mesh)
        costs = maker.same_serial(maker.costs(plan, topology, chunk_sizes(plan)))
        found = maker.exact(Candidate(plan=plan, costs=costs, bound_s=0.0))
        if found.forecast.fits:
            return found
    return found


def _needs(forecast: Forecast) -> str:
    worst = max(forecast.workers, key=lambda one: one.memory.peak_bytes - (one.memory_limit_bytes or 0))
    return f"{format_bytes(worst.memory.peak_bytes)} of {format_bytes(worst.memory_limit_bytes or 0)}"


def _nothing_fits(base: Plan, data_parallel: Ranked | None, nearest: Mapping[str, str], count: int) -> str:
    tried = "; ".join(f"{strategy} {why}" for strategy, why in nearest.items())
    if not tried and data_parallel is None:
        return (
            f"a batch of {base.batch} gives work to no mesh of {count} devices: use --batch {count} or more, or fewer "
            "devices"
        )
    return f"no plan for a batch of {base.batch} fits on {count} devices ({tried}): use a smaller batch or more memory"
