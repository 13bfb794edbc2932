"""Sums of gradients over replicas: buckets that leave inside a worker's last backward, as soon as they are full.

    compute      … B ─────────────────┤          a bucket is ready when the unit with the last of its gradients is done,
    collective        ── b0 ── b1 ──── b2 ──     in reverse order of the units; buckets go one after the other

While a collective runs beside computing, both take longer: the device spends a share of its time on it, and the
collective goes at a slower pace (on one core they take turns, on a GPU hardly). What computing ends at and which
collectives it overlaps with depend on each other: a fixed point of a few passes. What is left then is not hidden.
Running statistics of batch norms are averaged when all that is done.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from stagewright.simulator.collective import Group, all_reduce_s
from stagewright.simulator.costs.plan_costs import PlanCosts, scattering_s
from stagewright.simulator.action_graph import BACKWARD, BACKWARD_WEIGHT
from stagewright.simulator.step_times import StepTimes

__all__ = ["BUCKET_BYTES", "AllReduceTimes", "predict_gradient_allreduce", "min_exposed_allreduce_s", "statistics_bytes"]

BUCKET_BYTES = 8 << 20  # as the engine's
_PASSES = 16
_MOST_BUCKETS = 64  # of more, several that follow each other count as one


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceTimes:
    """One worker's sums of gradients."""

    spans_s: tuple[tuple[float, float], ...] = ()
    """Start and end of every bucket's collective."""
    slowed_s: float = 0.0
    """How much longer computing takes because of them."""
    end_s: float = 0.0
    """When the worker has computed and summed everything."""
    num_bytes: int = 0
    """Bytes that it gives to them."""

    @property
    def busy_s(self) -> float:
        """Time of all collectives."""
        return sum(end - start for start, end in self.spans_s)


def predict_gradient_allreduce(costs: PlanCosts, times: StepTimes, worker: int) -> AllReduceTimes:
    """The sums of the worker at a place along the pipeline."""
    plan = costs.plan
    computed = times.worker_end_s(worker)
    if plan.mesh.data == 1 or not plan.training:
        return AllReduceTimes(end_s=computed)
    return _with_statistics(costs, worker, _gradient_sums(costs, times, worker, computed))


def _gradient_sums(costs: PlanCosts, times: StepTimes, worker: int, computed: float) -> AllReduceTimes:
    plan = costs.plan
    if plan.shard:
        exposed = scattering_s(costs, worker)
        num_bytes = _sharded_bytes(costs, worker)
        return AllReduceTimes(spans_s=((computed, computed + exposed),), end_s=computed + exposed, num_bytes=num_bytes)
    group = costs.topology.group("data")
    merged = _merged(costs, worker)
    ready, sizes = _buckets(costs, times, worker, merged * BUCKET_BYTES)
    taken = [_one_by_one_s(group, size, merged) for size in sizes]
    share, pace = costs.engine_overheads.collective_share, costs.engine_overheads.collective_pace
    slowed = 0.0
    spans: list[tuple[float, float]] = []
    for _ in range(_PASSES):
        spans, at = [], 0.0
        for moment, (last_start, last_end), length in zip(*ready, taken, strict=True):
            stretch = 1 + slowed / max(last_end - last_start, 1e-12) if last_end > last_start else 1.0
            begin = max(at, last_start + (moment - last_start) * stretch)
            at = _end_s(begin, length, computed + slowed, pace)
            spans.append((begin, at))
        overlapped = sum(max(0.0, min(end, computed + slowed) - begin) for begin, end in spans)
        before, slowed = slowed, share * overlapped
        if abs(slowed - before) <= 1e-4 * computed:
            break
    end = max([computed + slowed, *(end for _, end in spans)])
    return AllReduceTimes(spans_s=tuple(spans), slowed_s=slowed, end_s=end, num_bytes=int(sum(sizes)))


def _sharded_bytes(costs: PlanCosts, worker: int) -> int:
    """Gathers before each pass of each micro-batch (what is gathered as a whole stays until its backward), and one
    scatter of gradients."""
    chunks, found = len(costs.shares), 0
    for stage in costs.stages:
        if stage.worker == worker:
            found += stage.parameter_bytes * (chunks + 1) + stage.alone_bytes * chunks
    return found


def min_exposed_allreduce_s(costs: PlanCosts, worker: int, backward_s: float) -> float:
    """What is sure to come after a worker's last action until its sums are done, however its actions are ordered.

    ``backward_s``: the longest backward of its first stage.
    """
    plan = costs.plan
    if plan.mesh.data == 1 or not plan.training:
        return 0.0
    if plan.shard:
        found = scattering_s(costs, worker)
    else:
        # All buckets of the stage that ends last leave at its end; of a worker's only stage, inside its last backward.
        own = [stage for stage in costs.stages if stage.worker == worker]
        group, merged = costs.topology.group("data"), _merged(costs, worker)
        size, pace = merged * BUCKET_BYTES, max(1.0, costs.engine_overheads.collective_pace)
        taken = []
        for stage in own:
            full, rest = divmod(stage.parameter_bytes, size)
            sums_s = full * _one_by_one_s(group, size, merged) + (_one_by_one_s(group, rest, merged) if rest else 0.0)
            taken.append(sums_s / pace)
        found = min(taken) if len(own) > 1 else max(0.0, taken[0] - backward_s)
    num_bytes = statistics_bytes(costs, worker)
    return found + (_statistics_s(costs, worker, num_bytes) if num_bytes else 0.0)


def _with_statistics(costs: PlanCosts, worker: int, sums: AllReduceTimes) -> AllReduceTimes:
    """The same and, after it, the averages of batch norm's running statistics; deferred ones are no part of this."""
    num_bytes = statistics_bytes(costs, worker)
    if not num_bytes:
        return sums
    end = sums.end_s + _statistics_s(costs, worker, num_bytes)
    return replace(
        sums, spans_s=(*sums.spans_s, (sums.end_s, end)), end_s=end, num_bytes=sums.num_bytes + int(num_bytes)
    )


def _statistics_s(costs: PlanCosts, worker: int, num_bytes: float) -> float:
    work_s = costs.model_overheads.statistics_s * costs.statistics_share(worker)
    work_s *= costs.crowded / costs.topology.speeds()[worker]
    return work_s + all_reduce_s(costs.topology.group("data"), num_bytes)


def statistics_bytes(costs: PlanCosts, worker: int) -> float:
    """Bytes of batch norm's running statistics that a worker averages with its replicas in a step."""
    all_bytes = costs.model_overheads.statistics_bytes
    none = not all_bytes or costs.plan.batch_norm == "deferred"
    return 0.0 if none else all_bytes * costs.statistics_share(worker)


def _merged(costs: PlanCosts, worker: int) -> int:
    """How many buckets that follow each other count as one."""
    own_bytes = sum(stage.parameter_bytes for stage in costs.stages if stage.worker == worker)
    return max(1, own_bytes // (_MOST_BUCKETS * BUCKET_BYTES))


def _end_s(begin: float, length: float, computed: float, pace: float) -> float:
    """When a collective ends that goes slower as long as the device computes."""
    done = max(0.0, computed - begin) * pace
    return begin + length / pace if length <= done else max(begin, computed) + length - done


@lru_cache(maxsize=4096)
def _one_by_one_s(group: Group, num_bytes: float, count: int) -> float:
    """Buckets that follow each other."""
    return count * all_reduce_s(group, num_bytes / count)


def _buckets(
    costs: PlanCosts, times: StepTimes, worker: int, bucket_bytes: int
) -> tuple[tuple[list[float], list[tuple[float, float]]], list[float]]:
    """When each bucket is full, inside which last backward, and how many bytes it has."""
    moments: list[float] = []
    windows: list[tuple[float, float]] = []
    sizes: list[float] = []
    own = [index for index, stage in enumerate(costs.stages) if stage.worker == worker]
    rows = times.actions_of(worker)
    backward = rows[(times.kind[rows] == BACKWARD) | (times.kind[rows] == BACKWARD_WEIGHT)]
    # Buckets leave when their stage is done.
    whole = len(own) > 1 or (times.kind[rows] == BACKWARD_WEIGHT).any()
    for index in reversed(own):
        stage = costs.stages[index]
        mine = backward[times.stage[backward] == index]
        last = int(mine[np.argmax(times.end_s[mine])])
        start, end = float(times.start_s[last]), float(times.end_s[last])
        units = [costs.gradients[at] for at in range(stage.last, stage.first - 1, -1)]
        scale = stage.parameter_bytes / max(1, sum(size for size, _ in units))  # shared ones count once
        total_s = sum(seconds for _, seconds in units)
        # Where a stage is recomputed, gradients come after its second forward.
        begin = end - (end - start) * _backward_share(costs, index)
        filled, passed, bucket = 0.0, 0.0, 0.0
        for size, seconds in units:
            left = size * scale
            while left > 0:
                took = min(left, bucket_bytes - bucket)
                bucket, left, filled = bucket + took, left - took, filled + took
                if bucket >= bucket_bytes:
                    share = (passed + seconds) / total_s if total_s else 1.0
                    moments.append(end if whole else begin + share * (end - begin))
                    windows.append((begin, end))
                    sizes.append(bucket)
                    bucket = 0.0
            passed += seconds
        if bucket > 0:
            moments.append(end)
            windows.append((begin, end))
            sizes.append(bucket)
    order = sorted(range(len(moments)), key=lambda at: moments[at])
    return ([moments[at] for at in order], [windows[at] for at in order]), [sizes[at] for at in order]


def _backward_share(costs: PlanCosts, index: int) -> float:
    """The part of a backward action that is backward, not forward again."""
    stage = costs.stages[index]
    backward = stage.backward_input_s + stage.backward_weight_s
    again = stage.forward_s if costs.recomputes(index) and costs.plan.recompute != "except-last" else 0.0
    return backward / (backward + again) if backward + again > 0 else 1.0
