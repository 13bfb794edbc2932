"""The search for the best plan: bound every plan, simulate the most promising ones.

    all plans ─► rules ─► lower bound of the step ─► in that order: exact forecast, memory
                          stop when the next bound exceeds the worst of the best ten
    do not fit ─────────► cuts and recomputed units solved together, by unit
    with codecs ────────► the same, until the next bound exceeds the best plan without one

The single-device baseline and data parallelism are always simulated for comparison. Costs of micro-batch sizes that
were not measured are interpolated. The baseline's size is measured first and the best plan's last; if that makes
another plan the best, its size is measured too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from stagewright.cluster.cluster import Cluster
from stagewright.errors import UsageError
from stagewright.planner.baseline import baseline_plan, fastest_baseline, microbatch_counts
from stagewright.planner.costs.measure import plan_microbatch_sizes
from stagewright.planner.costs.source import CostSource, measure_plan_size
from stagewright.planner.search.bounds import lower_bound_s, max_codec_saving_s
from stagewright.planner.search.by_unit import recompute_units
from stagewright.planner.search.candidates import CandidateBuilder
from stagewright.planner.search.choices import SearchSpace, enumerate_plans
from stagewright.planner.search.result import (
    Candidate,
    RankedPlan,
    SearchResult,
    explain_losers,
    explain_no_fit,
    memory_needed,
)
from stagewright.planner.search.searched import rank_searched
from stagewright.schedules.rules import FIXED_SCHEDULES
from stagewright.simulator.costs.link_codec import NO_CODEC, LinkCodec
from stagewright.simulator.costs.overheads import EngineOverheads
from stagewright.spec.activation_checkpointing import can_recompute_units
from stagewright.spec.plan import Axis, Mesh, Plan
from stagewright.spec.plan_rules import check_plan
from stagewright.spec.searched_order import lacks_order

_MAX_EXACT = 1000
_MIN_RANKED = 10
_MAX_BY_UNIT = 64


def search(
    base: Plan,
    source: CostSource,
    cluster: Cluster,
    overheads: EngineOverheads | None = None,
    *,
    top: int = 10,
    schedules: Sequence[str] = FIXED_SCHEDULES,
    recomputes: Sequence[str] = ("none", "always"),
    by_unit: bool = True,
    shards: Sequence[bool] = (False, True),
    zeros: Sequence[int] = (0,),
    codecs: Mapping[str, LinkCodec] | None = None,
    extra_codecs: Mapping[str, LinkCodec] | None = None,
    innermost: Axis = "pipeline",
    max_tensor: int = 64,
    num_devices: int | None = None,
    num_measured: int = 1,
    progress: Callable[[str], None] | None = None,
) -> SearchResult:
    """Find the best plans for a model and a batch on a cluster; measure the sizes of the first `num_measured`.

    ``by_unit``: also recompute units by name where plans do not fit, if plans with and without recomputation are
    searched. ``codecs`` are ranked like every other choice. Of the ``extra_codecs`` only the best plan is reported,
    apart from the ranking.
    """
    begin = time.perf_counter()
    overheads = overheads or EngineOverheads()
    num_devices = num_devices or cluster.num_devices
    link_codecs = dict(codecs or {"none": NO_CODEC})
    result = SearchResult()
    costs, forecast = fastest_baseline(base, source, cluster, overheads)
    result.serial = RankedPlan(plan=costs.plan, codec="none", forecast=forecast, costs=costs)
    baseline_size = max(plan_microbatch_sizes(costs.plan))
    result.is_serial_interpolated = source.model(baseline_size, 1).profile.source == "line"
    builder = CandidateBuilder(source, cluster, overheads, innermost, forecast.step_s)
    space = SearchSpace(
        schedules=schedules,
        recomputes=recomputes,
        shards=shards,
        zeros=zeros,
        codecs=tuple(link_codecs),
        devices_per_host=cluster.devices_per_host,
        with_degrees=innermost == "pipeline" and _differ(cluster, num_devices),
        max_tensor=max_tensor,
    )
    plans = enumerate_plans(base, source, num_devices, space)
    built = (builder.build(plan, codec, link_codecs.get(codec, NO_CODEC)) for plan, codec in plans)
    everything = [candidate for candidate in built if candidate is not None]
    candidates = [candidate for candidate in everything if not lacks_order(candidate.plan)]
    searched = [candidate for candidate in everything if lacks_order(candidate.plan)]
    if progress is not None:
        progress(f"{len(everything)} plans, bounded in {time.perf_counter() - begin:.1f} s …")
    min_s = _rank(builder, candidates, result, max(top, _MIN_RANKED))
    rank_searched(builder, searched, result, max(top, _MIN_RANKED), min_s)
    if by_unit and {"none", "always"} <= set(recomputes):
        _rank_by_unit(builder, link_codecs, result, max(top, _MIN_RANKED), min_s)
    _measure_best(builder, result, num_measured)
    result.with_codec = _best_with_codec(builder, candidates, result.best, extra_codecs or {})
    del result.best[top:]
    result.num_plans = len(everything) + builder.num_unfit
    result.num_unfit += builder.num_unfit
    result.data_parallel = _data_parallel(builder, base, num_devices)
    if not result.best:
        raise UsageError(explain_no_fit(base, result.data_parallel, builder.unfit, num_devices))
    result.losers = explain_losers(result.best, builder.unfit, min_s)
    result.seconds = time.perf_counter() - begin
    return result


def _differ(cluster: Cluster, num_devices: int) -> bool:
    """Return whether the devices differ in speed or memory."""
    return len({(device.speed, device.memory_bytes) for device in cluster.members[:num_devices]}) > 1


def _rank(
    builder: CandidateBuilder, candidates: list[Candidate], result: SearchResult, max_ranked: int
) -> dict[str, float]:
    """Simulate candidates in the order of their bounds, as long as one can still be among the best.

    Return the shortest step of each strategy that fits: simulated, or bounded.
    """
    min_s: dict[str, float] = {}
    candidates.sort(key=lambda candidate: candidate.bound_s)
    for number, candidate in enumerate(candidates):
        strategy, seconds = candidate.plan.mesh.strategy, candidate.bound_s
        too_slow = len(result.best) >= max_ranked and candidate.bound_s >= result.best[-1].forecast.step_s
        if not too_slow and (number < _MAX_EXACT or not result.best):
            ranked = builder.rank(candidate)
            seconds = ranked.forecast.step_s
            result.num_exact += 1
            if not ranked.forecast.fits:
                result.num_unfit += 1
                builder.unfit.setdefault(strategy, f"does not fit: {memory_needed(ranked.forecast)}")
                builder.overflowing.append(candidate)
                continue
            result.best.append(ranked)
            result.best.sort(key=lambda plan: plan.forecast.step_s)
            del result.best[max_ranked:]
        min_s[strategy] = min(seconds, min_s.get(strategy, math.inf))
    return min_s


def _rank_by_unit(
    builder: CandidateBuilder,
    codecs: Mapping[str, LinkCodec],
    result: SearchResult,
    max_ranked: int,
    min_s: dict[str, float],
) -> None:
    """Choose recomputed units for plans that do not fit without, as long as one can be among the best."""
    candidates = [candidate for candidate in builder.overflowing if can_recompute_units(candidate.plan)]
    candidates.sort(key=lambda candidate: candidate.bound_s)
    for candidate in candidates[:_MAX_BY_UNIT]:
        if len(result.best) >= max_ranked and candidate.bound_s >= result.best[-1].forecast.step_s:
            break
        ranked = recompute_units(builder, candidate.plan, candidate.codec, codecs.get(candidate.codec, NO_CODEC))
        if ranked is None:
            continue
        result.best = sorted([*result.best, ranked], key=lambda plan: plan.forecast.step_s)[:max_ranked]
        strategy = ranked.plan.mesh.strategy
        min_s[strategy] = min(ranked.forecast.step_s, min_s.get(strategy, math.inf))


def _measure_best(builder: CandidateBuilder, result: SearchResult, count: int) -> None:
    """Measure the micro-batch sizes of the first plans, until all of the first ones are measured."""
    while result.best:
        plans = [ranked.plan for ranked in result.best[:count]]
        measured = [measure_plan_size(builder.source, plan) for plan in plans]
        if not any(measured):
            return
        # A new measurement also changes the interpolation of the sizes next to it.
        updated = [builder.update(ranked) for ranked in result.best]
        fitting = (ranked for ranked in updated if ranked.forecast.fits)
        result.best = sorted(fitting, key=lambda ranked: ranked.forecast.step_s)


def _best_with_codec(
    builder: CandidateBuilder,
    candidates: Sequence[Candidate],
    best: Sequence[RankedPlan],
    codecs: Mapping[str, LinkCodec],
) -> RankedPlan | None:
    """Return the fastest pipeline with one of these codecs, if it is faster than the best plan."""
    min_s = best[0].forecast.step_s if best else math.inf
    fastest: RankedPlan | None = None
    coded = []
    for candidate in candidates:
        plan, costs = candidate.plan, candidate.costs
        can_win = candidate.bound_s - max_codec_saving_s(costs) < min_s
        if candidate.codec != "none" or plan.mesh.pipeline == 1 or not can_win:
            continue
        for name, codec in codecs.items():
            with_codec = replace(costs, plan=replace(plan, codec=name), codecs=(codec,) * (plan.num_stages - 1))
            bound_s = lower_bound_s(with_codec)
            coded.append(Candidate(plan=with_codec.plan, costs=with_codec, bound_s=bound_s, codec=name))
    for candidate in sorted(coded, key=lambda candidate: candidate.bound_s):
        if candidate.bound_s >= min_s:
            break
        ranked = builder.rank(candidate)
        if ranked.forecast.fits and ranked.forecast.step_s < min_s:
            fastest, min_s = ranked, ranked.forecast.step_s
    return fastest


def _data_parallel(builder: CandidateBuilder, base: Plan, num_devices: int) -> RankedPlan | None:
    """Return data parallelism with the fewest micro-batches that fit, or with the most if none fits."""
    if base.batch < num_devices:
        return None
    ranked: RankedPlan | None = None
    for count in microbatch_counts(-(-base.batch // num_devices)):
        plan = baseline_plan(base, Mesh(data=num_devices), count)
        try:
            check_plan(plan)
        except UsageError:
            continue
        costs = builder.costs(plan, builder.topology(plan))
        ranked = builder.rank(Candidate(plan=plan, costs=costs, bound_s=0.0))
        if ranked.forecast.fits:
            return ranked
    return ranked
