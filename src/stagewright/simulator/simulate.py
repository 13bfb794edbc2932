"""The forecast of a plan's step: times of its actions, gradient all-reduce, optimizer step, memory, traffic.

    costs ─► pipeline_times ─► gradient all-reduce ─► tied weights ─► optimizer step ─► all-reduce of the loss ─► step

Peers along data and tensor behave identically, so one of each is simulated.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Literal

from stagewright.simulator.action_graph import FORWARD, KINDS
from stagewright.simulator.collective import all_reduce_s, ring_bytes
from stagewright.simulator.costs.plan_costs import PlanCosts
from stagewright.simulator.forecast import CollectiveUse, Forecast, LinkUse, Segment, WorkerForecast
from stagewright.simulator.gradient_allreduce import AllReduceTimes, predict_gradient_allreduce
from stagewright.simulator.memory import worker_memory
from stagewright.simulator.step_times import StepTimes, pipeline_times, worker_ends_s

MAX_SEGMENTS = 20_000  # longer timelines are left out


def predict(costs: PlanCosts, cut_names: tuple[str, ...] = (), *, timeline: bool = True) -> Forecast:
    """Predict a plan's step."""
    plan = costs.plan
    times = pipeline_times(costs)
    allreduces = [predict_gradient_allreduce(costs, times, worker) for worker in range(plan.mesh.pipeline)]
    ends = _gradients_ready_s(costs, [allreduce.end_s for allreduce in allreduces])
    step_s = step_end_s(costs, [allreduce.end_s for allreduce in allreduces])
    repeats = 1 if plan.training else plan.steps
    workers = tuple(
        _predict_worker(costs, times, allreduce, worker, step_s, repeats) for worker, allreduce in enumerate(allreduces)
    )
    step_s /= repeats
    return Forecast(
        model=plan.model.name,
        mesh=str(plan.mesh),
        strategy=plan.mesh.strategy,
        num_workers=plan.mesh.num_workers,
        schedule=plan.schedule,
        batch=plan.batch,
        microbatches=plan.microbatches,
        cuts=cut_names,
        step_s=step_s,
        samples_per_s=plan.batch / step_s if step_s > 0 else float("inf"),
        serial_s=costs.serial_s,
        speedup=costs.serial_s / step_s if step_s > 0 else float("inf"),
        workers=workers,
        links=_links(costs),
        collectives=_collectives(costs, allreduces),
        tensor_bytes=max(sum(costs.tensor_bytes(worker)) for worker in range(plan.mesh.pipeline)),
        data_bytes=max(allreduce.num_bytes for allreduce in allreduces),
        segments=_segments(costs, times, allreduces, ends) if timeline else (),
    )


def step_seconds(costs: PlanCosts) -> float:
    """Predict only the step time."""
    if costs.plan.mesh.data == 1:
        ends = worker_ends_s(costs)
    else:
        times = pipeline_times(costs)
        ends = [predict_gradient_allreduce(costs, times, worker).end_s for worker in range(costs.plan.mesh.pipeline)]
    return step_end_s(costs, ends) / (1 if costs.plan.training else costs.plan.steps)


def step_end_s(costs: PlanCosts, ends: list[float]) -> float:
    """Return the end of the step, given the end of each worker's compute and gradient all-reduce."""
    plan, overheads = costs.plan, costs.engine_overheads
    if not plan.training:
        return max(ends) + overheads.step_s * plan.steps
    done = [
        end + optimizer_s(costs, worker) + costs.parameter_gather_s(worker)
        for worker, end in enumerate(_gradients_ready_s(costs, ends))
    ]
    loss_s = all_reduce_s(costs.topology.group("data"), 8.0) if plan.mesh.data > 1 else 0.0
    return max(done) + loss_s + overheads.step_s + overheads.chunk_s * len(costs.shares)


def _gradients_ready_s(costs: PlanCosts, ends: list[float]) -> list[float]:
    """Return when each worker has all its gradients; tied weights are all-reduced last, between their two workers."""
    if not costs.tied_bytes or not costs.plan.training:
        return ends
    last = costs.plan.mesh.pipeline - 1
    tied_end = max(ends) + all_reduce_s(costs.topology.pair(0, last), costs.tied_bytes)
    return [tied_end if worker in (0, last) else end for worker, end in enumerate(ends)]


def optimizer_s(costs: PlanCosts, worker: int) -> float:
    """Return the time of a worker's optimizer step."""
    if costs.balanced_optimizer:
        count = costs.plan.mesh.pipeline
        unbalanced = replace(costs, balanced_optimizer=False)
        return sum(optimizer_s(unbalanced, index) for index in range(count)) / count
    if not costs.plan.training:
        return 0.0
    num_bytes = sum(stage.parameter_bytes for stage in costs.stages if stage.worker == worker)
    slowdown = costs.contention / costs.topology.speeds()[worker]
    return num_bytes / costs.plan.num_shards * costs.model_overheads.optimizer_s_per_byte * slowdown


def _predict_worker(
    costs: PlanCosts, times: StepTimes, allreduce: AllReduceTimes, worker: int, step_s: float, repeats: int
) -> WorkerForecast:
    rows = times.actions_of(worker)
    actions = float((times.end_s[rows] - times.start_s[rows]).sum())
    tensor = float(times.collective_s[rows].sum())
    data = max(0.0, allreduce.end_s - times.worker_end_s(worker) - allreduce.slowed_s)
    data += costs.parameter_gather_s(worker)
    optimizer = optimizer_s(costs, worker)
    compute = actions - tensor + allreduce.slowed_s
    sent, received = times.sent_by(worker), times.received_by(worker)
    return WorkerForecast(
        worker=worker,
        stages=tuple(index for index, stage in enumerate(costs.stages) if stage.worker == worker),
        compute_s=compute / repeats,
        recompute_s=_recompute_s(costs, worker),
        tensor_s=tensor / repeats,
        data_s=data / repeats,
        optimizer_s=optimizer / repeats,
        idle_s=max(0.0, step_s - compute - tensor - data - optimizer) / repeats,
        send_s=float((times.arrived_s[sent] - times.sent_s[sent]).sum()) / repeats,
        receive_s=float((times.arrived_s[received] - times.sent_s[received]).sum()) / repeats,
        memory=worker_memory(costs, times, worker),
        memory_limit_bytes=_min_limit(costs.topology.memory_limits()[worker], costs.plan.memory_bytes),
    )


def _min_limit(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _recompute_s(costs: PlanCosts, worker: int) -> float:
    return sum(
        stage.recompute_s * sum(costs.recomputed_shares)
        for index, stage in enumerate(costs.stages)
        if stage.worker == worker and costs.recomputes(index)
    )


def _links(costs: PlanCosts) -> tuple[LinkUse, ...]:
    links = []
    share_counts = Counter(costs.shares)
    for edge in range(len(costs.stages) - 1):
        stage, behind = costs.stages[edge], costs.stages[edge + 1]
        if stage.worker == behind.worker:
            continue
        size = stage.sent_bytes * costs.codecs[edge].ratio
        copies = stage.copies if costs.plan.training else stage.copies[:1]
        link = costs.topology.link(stage.worker, behind.worker)
        links.append(
            LinkUse(
                edge=edge,
                sender=stage.worker,
                receiver=behind.worker,
                num_bytes=int(sum(copies) * size * sum(costs.shares)),
                busy_s=sum(
                    count * link.message_s(size * share * number)
                    for share, count in share_counts.items()
                    for number in copies
                ),
            )
        )
    return tuple(links)


def _collectives(costs: PlanCosts, allreduces: list[AllReduceTimes]) -> tuple[CollectiveUse, ...]:
    """Return the traffic of each axis on a ring; other algorithms send about as much."""
    plan, uses = costs.plan, []

    def add(
        axis: Literal["data", "tensor", "expert", "tied"],
        worker: int,
        count: int,
        num_bytes: int,
        passes: int = 2,
        gathered_bytes: int = 0,
        sent: int = 0,
    ) -> None:
        if count > 1 and (num_bytes or gathered_bytes):
            rings = ring_bytes(count, num_bytes, passes=passes) + ring_bytes(count, gathered_bytes, passes=1)
            sent = sent or int(rings)
            num_bytes += gathered_bytes
            uses.append(
                CollectiveUse(axis=axis, worker=worker, num_workers=count, num_bytes=num_bytes, sent_bytes=sent)
            )

    for worker, allreduce in enumerate(allreduces):
        reduced, gathered = costs.tensor_bytes(worker)
        add("tensor", worker, plan.mesh.degrees[worker], reduced, gathered_bytes=gathered)
        add("expert", worker, plan.mesh.expert, costs.expert_row_bytes(worker), passes=1)
        replicated = costs.replicated_gradient_bytes(worker)
        sent = 0
        if replicated:  # HSDP: a ring in each group, and one across groups
            sent = int(ring_bytes(plan.num_shards, allreduce.num_bytes - replicated, passes=1))
            sent += int(ring_bytes(plan.mesh.data // plan.num_shards, replicated, passes=2))
        passes = 1 if plan.shard or plan.zero else 2
        add("data", worker, plan.mesh.data, allreduce.num_bytes, passes=passes, sent=sent)
        if plan.training and worker in (0, plan.mesh.pipeline - 1):
            add("tied", worker, costs.topology.pair(0, plan.mesh.pipeline - 1).num_workers, costs.tied_bytes)
    return tuple(uses)


def _segments(
    costs: PlanCosts, times: StepTimes, allreduces: list[AllReduceTimes], ends: list[float]
) -> tuple[Segment, ...]:
    """Return the timeline, worker by worker; () if it is too long."""
    if len(times.worker) + len(times.sender) > MAX_SEGMENTS:
        return ()
    segments: list[Segment] = []

    def add(worker: int, stream: str, name: str, stage: int, microbatch: int, start: float, end: float) -> None:
        if end > start:
            segments.append(
                Segment(
                    worker=worker,
                    stream=stream,  # type: ignore[arg-type]
                    name=name,
                    stage=stage,
                    microbatch=microbatch,
                    start_s=float(start),
                    end_s=float(end),
                )
            )

    for row in range(len(times.worker)):
        worker, stage, microbatch = int(times.worker[row]), int(times.stage[row]), int(times.microbatch[row])
        start, end, tail = times.start_s[row], times.end_s[row], times.collective_s[row]
        add(worker, "compute", KINDS[times.kind[row]].value, stage, microbatch, start, end - tail)
        add(worker, "tensor", "all-reduce", stage, microbatch, end - tail, end)
    for row in range(len(times.sender)):
        name = "message" if times.direction[row] == FORWARD else "gradient"
        stage, microbatch = int(times.origin[row]), int(times.p2p_microbatch[row])
        add(int(times.sender[row]), "send", name, stage, microbatch, times.sent_s[row], times.arrived_s[row])
        add(int(times.receiver[row]), "receive", name, stage, microbatch, times.sent_s[row], times.arrived_s[row])
    for worker, allreduce in enumerate(allreduces):
        for start, end in allreduce.spans_s:
            add(worker, "data", "all-reduce", -1, -1, start, end)
        if costs.plan.training:
            stepped = ends[worker] + optimizer_s(costs, worker)
            add(worker, "compute", "optimizer", -1, -1, ends[worker], stepped)
            add(worker, "data", "all-gather", -1, -1, stepped, stepped + costs.parameter_gather_s(worker))
    segments.sort(key=lambda segment: (segment.worker, segment.stream, segment.start_s))
    return tuple(segments)
