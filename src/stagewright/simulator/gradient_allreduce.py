"""Gradient all-reduce over replicas: buckets that start during a worker's last backward, as soon as they are full.

    compute      … B ─────────────────┤          a bucket is ready when its last gradient is computed, in reverse order
    collective        ── b0 ── b1 ──── b2 ──     of the units; buckets run one after the other

While a collective overlaps with compute, both slow down: the device spends a fraction of its time on the collective,
and the collective runs at a lower speed (on one core they compete, on a GPU hardly). The end of compute and the overlap
depend on each other, so both are found by fixed-point iteration. The remainder is exposed. Running statistics of batch
norm are averaged afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from stagewright.simulator.action_graph import BACKWARD, BACKWARD_WEIGHT
from stagewright.simulator.collective import Group, all_reduce_s
from stagewright.simulator.costs.plan_costs import PlanCosts
from stagewright.simulator.step_times import StepTimes

BUCKET_BYTES = 8 << 20  # as in the engine
_MAX_ITERATIONS = 16
_MAX_BUCKETS = 64  # more buckets are merged into groups


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceTimes:
    """One worker's gradient all-reduce."""

    spans_s: tuple[tuple[float, float], ...] = ()
    """Start and end of each bucket's collective."""
    slowed_s: float = 0.0
    """Compute time added by the overlap."""
    end_s: float = 0.0
    """When both compute and collectives are done."""
    num_bytes: int = 0

    @property
    def busy_s(self) -> float:
        """Total time of the collectives."""
        return sum(end - start for start, end in self.spans_s)


@dataclass(frozen=True, slots=True)
class _Bucket:
    ready_s: float
    """When its last gradient is computed."""
    backward_start_s: float
    """The stage's last backward, in which it fills."""
    backward_end_s: float
    num_bytes: float


def predict_gradient_allreduce(costs: PlanCosts, times: StepTimes, worker: int) -> AllReduceTimes:
    """Predict the gradient all-reduce of the worker at a pipeline index."""
    plan = costs.plan
    compute_end = times.worker_end_s(worker)
    if plan.mesh.data == 1 or not plan.training:
        return AllReduceTimes(end_s=compute_end, num_bytes=_fsdp_bytes(costs, worker) if plan.shard else 0)
    if plan.shard or plan.zero:
        end = compute_end + costs.reduce_scatter_s(worker) + _replicated_s(costs, worker)
        num_bytes = _zero_bytes(costs, worker) if plan.zero else _fsdp_bytes(costs, worker)
        num_bytes += costs.replicated_gradient_bytes(worker)
        gradients = AllReduceTimes(spans_s=((compute_end, end),), end_s=end, num_bytes=num_bytes)
    else:
        gradients = _with_experts(costs, worker, _overlap_buckets(costs, times, worker, compute_end))
    return _with_statistics(costs, worker, gradients)


def _overlap_buckets(costs: PlanCosts, times: StepTimes, worker: int, compute_end: float) -> AllReduceTimes:
    group, merged = costs.topology.group("data"), _num_merged(costs, worker)
    buckets = _fill_buckets(costs, times, worker, merged * BUCKET_BYTES)
    durations = [_sequential_s(group, bucket.num_bytes, merged) for bucket in buckets]
    share, pace = costs.engine_overheads.collective_share, costs.engine_overheads.collective_pace
    slowed = 0.0
    spans: list[tuple[float, float]] = []
    for _ in range(_MAX_ITERATIONS):
        spans, previous_end = [], 0.0
        for bucket, duration in zip(buckets, durations, strict=True):
            start, end = bucket.backward_start_s, bucket.backward_end_s
            stretch = 1 + slowed / max(end - start, 1e-12) if end > start else 1.0
            begin = max(previous_end, start + (bucket.ready_s - start) * stretch)
            previous_end = _collective_end_s(begin, duration, compute_end + slowed, pace)
            spans.append((begin, previous_end))
        overlap = sum(max(0.0, min(end, compute_end + slowed) - begin) for begin, end in spans)
        before, slowed = slowed, share * overlap
        if abs(slowed - before) <= 1e-4 * compute_end:
            break
    return AllReduceTimes(
        spans_s=tuple(spans),
        slowed_s=slowed,
        end_s=max([compute_end + slowed, *(end for _, end in spans)]),
        num_bytes=int(sum(bucket.num_bytes for bucket in buckets)),
    )


def _replicated_s(costs: PlanCosts, worker: int) -> float:
    """Return the time of HSDP's all-reduce over the replicas that hold the same shards."""
    num_bytes = costs.replicated_gradient_bytes(worker)
    return all_reduce_s(costs.topology.replicate_group(costs.plan.num_shards), num_bytes) if num_bytes else 0.0


def _fsdp_bytes(costs: PlanCosts, worker: int) -> int:
    """Return the bytes of FSDP's collectives: all-gathers before each pass, and one reduce-scatter.

    Parameters gathered with the whole stage stay until its backward, so they are gathered once per micro-batch. In a
    pipeline they are not, and gradients are reduce-scattered in each micro-batch.
    """
    plan, count = costs.plan, len(costs.shares)
    stages = [stage for stage in costs.stages if stage.worker == worker]
    if plan.gathers_once:
        return 2 * costs.held_parameter_bytes(worker)
    if not plan.training or plan.scatters_every_microbatch:
        return (3 if plan.training else 1) * count * sum(stage.parameter_bytes for stage in stages)
    return sum(stage.parameter_bytes * (count + 1) + stage.separate_bytes * count for stage in stages)


def _zero_bytes(costs: PlanCosts, worker: int) -> int:
    """Return the bytes of ZeRO's collectives: its reduce-scatters, and the all-gather after the optimizer step."""
    own = [index for index, stage in enumerate(costs.stages) if stage.worker == worker]
    sent = sum(costs.stages[index].parameter_bytes for index in own) * costs.num_reduce_scatters
    shared = [entry for entry in costs.shared_parameters if entry.later in own]
    if costs.num_reduce_scatters == 1:  # in ZeRO-2, each stage that holds a parameter sends its gradient
        sent -= sum(entry.num_bytes for entry in shared)
    return sent + costs.held_parameter_bytes(worker)


def min_exposed_allreduce_s(costs: PlanCosts, worker: int, backward_s: float) -> float:
    """Return a lower bound on the exposed all-reduce after a worker's last action, for any order of its actions.

    ``backward_s``: the longest backward of its first stage.
    """
    plan = costs.plan
    if plan.mesh.data == 1 or not plan.training:
        return 0.0
    if plan.shard or plan.zero:
        exposed_s = costs.reduce_scatter_s(worker) + _replicated_s(costs, worker)
    else:
        # The buckets of the stage that ends last start at its end; with a single stage, inside its last backward.
        group, merged = costs.topology.group("data"), _num_merged(costs, worker)
        size, pace = merged * BUCKET_BYTES, max(1.0, costs.engine_overheads.collective_pace)
        stage_s = []
        for stage in (stage for stage in costs.stages if stage.worker == worker):
            full, rest = divmod(stage.parameter_bytes - stage.expert_bytes, size)
            total_s = full * _sequential_s(group, size, merged) + (_sequential_s(group, rest, merged) if rest else 0.0)
            stage_s.append(total_s / pace)
        exposed_s = min(stage_s) if len(stage_s) > 1 else max(0.0, stage_s[0] - backward_s)
    num_bytes = statistics_bytes(costs, worker)
    return exposed_s + (_statistics_s(costs, worker, num_bytes) if num_bytes else 0.0)


def _with_experts(costs: PlanCosts, worker: int, gradients: AllReduceTimes) -> AllReduceTimes:
    """Append the all-reduce of experts' gradients over the replicas that hold the same experts."""
    num_bytes = sum(stage.expert_bytes for stage in costs.stages if stage.worker == worker)
    mesh = costs.plan.mesh
    if not num_bytes or mesh.data == mesh.expert:
        return gradients
    end = gradients.end_s + all_reduce_s(costs.topology.same_experts_group(), num_bytes)
    return replace(
        gradients,
        spans_s=(*gradients.spans_s, (gradients.end_s, end)),
        end_s=end,
        num_bytes=gradients.num_bytes + num_bytes,
    )


def _with_statistics(costs: PlanCosts, worker: int, gradients: AllReduceTimes) -> AllReduceTimes:
    """Append the average of batch norm's running statistics; deferred statistics have none."""
    num_bytes = statistics_bytes(costs, worker)
    if not num_bytes:
        return gradients
    end = gradients.end_s + _statistics_s(costs, worker, num_bytes)
    return replace(
        gradients,
        spans_s=(*gradients.spans_s, (gradients.end_s, end)),
        end_s=end,
        num_bytes=gradients.num_bytes + int(num_bytes),
    )


def _statistics_s(costs: PlanCosts, worker: int, num_bytes: float) -> float:
    compute_s = costs.model_overheads.statistics_s * costs.statistics_share(worker)
    compute_s *= costs.contention / costs.topology.speeds()[worker]
    return compute_s + all_reduce_s(costs.topology.group("data"), num_bytes)


def statistics_bytes(costs: PlanCosts, worker: int) -> float:
    """Return the bytes of batch norm's running statistics that a worker averages over its replicas in a step."""
    total_bytes = costs.model_overheads.statistics_bytes
    if not total_bytes or costs.plan.batch_norm == "deferred":
        return 0.0
    return total_bytes * costs.statistics_share(worker)


def _num_merged(costs: PlanCosts, worker: int) -> int:
    """Return how many consecutive buckets are simulated as one."""
    worker_bytes = sum(stage.parameter_bytes for stage in costs.stages if stage.worker == worker)
    return max(1, worker_bytes // (_MAX_BUCKETS * BUCKET_BYTES))


def _collective_end_s(begin: float, duration: float, compute_end: float, pace: float) -> float:
    """Return the end of a collective that runs at a lower speed while the device computes."""
    done = max(0.0, compute_end - begin) * pace
    return begin + duration / pace if duration <= done else max(begin, compute_end) + duration - done


@lru_cache(maxsize=4096)
def _sequential_s(group: Group, num_bytes: float, count: int) -> float:
    """Return the time of `count` consecutive buckets with `num_bytes` in total."""
    return count * all_reduce_s(group, num_bytes / count)


def _fill_buckets(costs: PlanCosts, times: StepTimes, worker: int, bucket_bytes: int) -> list[_Bucket]:
    """Return the worker's buckets in the order in which they become ready."""
    stages = [index for index, stage in enumerate(costs.stages) if stage.worker == worker]
    rows = times.actions_of(worker)
    backward = rows[(times.kind[rows] == BACKWARD) | (times.kind[rows] == BACKWARD_WEIGHT)]
    # With several stages or a split backward, buckets start when their stage is done.
    at_stage_end = len(stages) > 1 or bool((times.kind[rows] == BACKWARD_WEIGHT).any())
    buckets: list[_Bucket] = []
    for index in reversed(stages):
        stage_rows = backward[times.stage[backward] == index]
        last = int(stage_rows[np.argmax(times.end_s[stage_rows])])
        start, end = float(times.start_s[last]), float(times.end_s[last])
        # A recomputed stage produces gradients only after its recomputation.
        start = end - (end - start) * _backward_share(costs, index)
        for fraction, num_bytes in _stage_buckets(costs, index, bucket_bytes):
            ready = end if at_stage_end else start + fraction * (end - start)
            buckets.append(_Bucket(ready, start, end, num_bytes))
    return sorted(buckets, key=lambda bucket: bucket.ready_s)


def _stage_buckets(costs: PlanCosts, index: int, bucket_bytes: int) -> Sequence[tuple[float, float]]:
    """Return a stage's buckets: the fraction of its backward after which each is full, and its bytes."""
    stage = costs.stages[index]
    units = [costs.gradients[unit] for unit in range(stage.last, stage.first - 1, -1)]
    common_bytes = stage.parameter_bytes - stage.expert_bytes
    scale = common_bytes / max(1, sum(size for size, _ in units))  # shared parameters count once
    total_s = sum(seconds for _, seconds in units)
    buckets: list[tuple[float, float]] = []
    elapsed, filled = 0.0, 0.0
    for size, seconds in units:
        elapsed += seconds
        remaining = size * scale
        while remaining > 0:
            added = min(remaining, bucket_bytes - filled)
            filled, remaining = filled + added, remaining - added
            if filled >= bucket_bytes:
                buckets.append((elapsed / total_s if total_s else 1.0, filled))
                filled = 0.0
    if filled > 0:
        buckets.append((1.0, filled))
    return buckets


def _backward_share(costs: PlanCosts, index: int) -> float:
    """Return the fraction of a backward action that is not recomputation."""
    stage = costs.stages[index]
    backward = stage.backward_input_s + stage.backward_weight_s
    recompute = stage.recompute_s if costs.recomputes(index) and costs.plan.recompute != "except-last" else 0.0
    return backward / (backward + recompute) if backward + recompute > 0 else 1.0
