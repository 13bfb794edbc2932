"""Predict a plan's step: times of its actions, sums of gradients, the optimiser, memory, bytes.

    costs ─► pipeline_times ─► predict_gradient_allreduce of each worker ─► tied weights ─► optimiser ─► loss of all ─► step

Peers along data and tensor do the same at the same time, so one of each is simulated.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Literal

from stagewright.simulator.collective import all_reduce_s, ring_bytes
from stagewright.simulator.costs.plan_costs import PlanCosts
from stagewright.simulator.forecast import CollectiveUse, Forecast, LinkUse, Segment, WorkerForecast
from stagewright.simulator.gradient_allreduce import AllReduceTimes, predict_gradient_allreduce
from stagewright.simulator.memory import worker_memory
from stagewright.simulator.action_graph import FORWARD, KINDS
from stagewright.simulator.step_times import StepTimes, pipeline_times, worker_ends_s

__all__ = ["MAX_SEGMENTS", "predict", "step_end_s", "step_seconds"]

MAX_SEGMENTS = 20_000  # a timeline of more is of no use to anyone


def predict(costs: PlanCosts, cut_names: tuple[str, ...] = (), *, timeline: bool = True) -> Forecast:
    """The forecast of a plan; with its timeline or without."""
    plan = costs.plan
    times = pipeline_times(costs)
    sums = [predict_gradient_allreduce(costs, times, worker) for worker in range(plan.mesh.pipeline)]
    ends = _summed_s(costs, [one.end_s for one in sums])
    step_s = step_end_s(costs, [one.end_s for one in sums])
    repeats = 1 if plan.training else plan.steps
    workers = tuple(_worker(costs, times, sums[at], at, step_s, repeats) for at in range(plan.mesh.pipeline))
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
        collectives=_collectives(costs, sums),
        tensor_bytes=max(costs.tensor_bytes(at) for at in range(plan.mesh.pipeline)),
        data_bytes=max(one.num_bytes for one in sums),
        segments=_segments(costs, times, sums, ends) if timeline else (),
    )


def step_seconds(costs: PlanCosts) -> float:
    """The step's time alone."""
    if costs.plan.mesh.data == 1:
        ends = worker_ends_s(costs)
    else:
        times = pipeline_times(costs)
        ends = [predict_gradient_allreduce(costs, times, worker).end_s for worker in range(costs.plan.mesh.pipeline)]
    return step_end_s(costs, ends) / (1 if costs.plan.training else costs.plan.steps)


def step_end_s(costs: PlanCosts, ends: list[float]) -> float:
    """The end of the step, where each worker has computed and summed over its replicas at one of `ends`."""
    plan, terms = costs.plan, costs.engine_overheads
    if not plan.training:
        return max(ends) + terms.step_s * plan.steps
    done = [end + optimizer_s(costs, at) for at, end in enumerate(_summed_s(costs, ends))]
    loss_s = all_reduce_s(costs.topology.group("data"), 8.0) if plan.mesh.data > 1 else 0.0
    return max(done) + loss_s + terms.step_s + terms.chunk_s * len(costs.shares)


def _summed_s(costs: PlanCosts, ends: list[float]) -> list[float]:
    """When each worker has all its gradients: tied weights are summed over their holders when these have done all else,
    and they wait for each other."""
    if not costs.tied_bytes or not costs.plan.training:
        return ends
    last = costs.plan.mesh.pipeline - 1
    together = max(ends) + all_reduce_s(costs.topology.pair(0, last), costs.tied_bytes)
    return [together if at in (0, last) else end for at, end in enumerate(ends)]


def optimizer_s(costs: PlanCosts, worker: int) -> float:
    """The optimiser's step of a worker."""
    if costs.even_optimizer:
        count = costs.plan.mesh.pipeline
        return sum(optimizer_s(replace(costs, even_optimizer=False), one) for one in range(count)) / count
    own = sum(stage.parameter_bytes for stage in costs.stages if stage.worker == worker)
    divide = costs.plan.mesh.data if costs.plan.shard else 1
    speed = costs.topology.speeds()[worker]
    return own / divide * costs.model_overheads.optimizer_s_per_byte * costs.crowded / speed if costs.plan.training else 0.0


def _worker(costs: PlanCosts, times: StepTimes, sums: AllReduceTimes, worker: int, step_s: float, repeats: int) -> WorkerForecast:
    mine = times.actions_of(worker)
    taken = float((times.end_s[mine] - times.start_s[mine]).sum())
    tensor = float(times.collective_s[mine].sum())
    data = max(0.0, sums.end_s - times.worker_end_s(worker) - sums.slowed_s)
    optimizer = optimizer_s(costs, worker)
    computing = taken - tensor + sums.slowed_s
    sent, received = times.sent_by(worker), times.received_by(worker)
    return WorkerForecast(
        worker=worker,
        stages=tuple(index for index, stage in enumerate(costs.stages) if stage.worker == worker),
        compute_s=computing / repeats,
        recompute_s=_recompute_s(costs, worker),
        tensor_s=tensor / repeats,
        data_s=data / repeats,
        optimizer_s=optimizer / repeats,
        idle_s=max(0.0, step_s - computing - tensor - data - optimizer) / repeats,
        send_s=float((times.arrived_s[sent] - times.sent_s[sent]).sum()) / repeats,
        receive_s=float((times.arrived_s[received] - times.sent_s[received]).sum()) / repeats,
        memory=worker_memory(costs, times, worker),
        memory_limit_bytes=_least(costs.topology.memory_limits()[worker], costs.plan.memory_bytes),
    )


def _least(*limits: int | None) -> int | None:
    return min((one for one in limits if one is not None), default=None)


def _recompute_s(costs: PlanCosts, worker: int) -> float:
    return sum(
        stage.forward_s * sum(costs.recomputed_shares)
        for index, stage in enumerate(costs.stages)
        if stage.worker == worker and costs.recomputes(index)
    )


def _links(costs: PlanCosts) -> tuple[LinkUse, ...]:
    found = []
    ways = 2 if costs.plan.training else 1
    alike = Counter(costs.shares)
    for edge in range(len(costs.stages) - 1):
        stage, behind = costs.stages[edge], costs.stages[edge + 1]
        if stage.worker == behind.worker:
            continue
        size = stage.sends_bytes * costs.codecs[edge].ratio
        link = costs.topology.link(stage.worker, behind.worker)
        found.append(
            LinkUse(
                edge=edge,
                sender=stage.worker,
                receiver=behind.worker,
                num_bytes=int(ways * size * sum(costs.shares)),
                busy_s=ways * sum(count * link.message_s(size * share) for share, count in alike.items()),
            )
        )
    return tuple(found)


def _collectives(costs: PlanCosts, sums: list[AllReduceTimes]) -> tuple[CollectiveUse, ...]:
    """What goes around the rings of each axis; where a library takes another way, about as much."""
    plan, found = costs.plan, []

    def add(axis: Literal["data", "tensor", "tied"], worker: int, count: int, num_bytes: int, passes: int = 2) -> None:
        if count > 1 and num_bytes:
            sent = int(ring_bytes(count, num_bytes, passes=passes))
            found.append(
                CollectiveUse(axis=axis, worker=worker, num_workers=count, num_bytes=num_bytes, sent_bytes=sent)
            )

    for worker, one in enumerate(sums):
        add("tensor", worker, plan.mesh.tensor, costs.tensor_bytes(worker))
        add("data", worker, plan.mesh.data, one.num_bytes, passes=1 if plan.shard else 2)
        if plan.training and worker in (0, plan.mesh.pipeline - 1):
            add("tied", worker, 2, costs.tied_bytes)
    return tuple(found)


def _segments(costs: PlanCosts, times: StepTimes, sums: list[AllReduceTimes], ends: list[float]) -> tuple[Segment, ...]:
    """The timeline, worker by worker; none where it would be too long to look at."""
    if len(times.worker) + len(times.sender) > MAX_SEGMENTS:
        return ()
    found: list[Segment] = []

    def add(worker: int, stream: str, name: str, stage: int, chunk: int, start: float, end: float) -> None:
        if end > start:
            found.append(
                Segment(
                    worker=worker,
                    stream=stream,  # type: ignore[arg-type]
                    name=name,
                    stage=stage,
                    microbatch=chunk,
                    start_s=float(start),
                    end_s=float(end),
                )
            )

    for at in range(len(times.worker)):
        worker, stage, chunk = int(times.worker[at]), int(times.stage[at]), int(times.microbatch[at])
        start, end, tail = times.start_s[at], times.end_s[at], times.collective_s[at]
        add(worker, "compute", KINDS[times.kind[at]].value, stage, chunk, start, end - tail)
        add(worker, "tensor", "all-reduce", stage, chunk, end - tail, end)
    for at in range(len(times.sender)):
        name = "message" if times.direction[at] == FORWARD else "gradient"
        stage, chunk = int(times.origin[at]), int(times.message_microbatch[at])
        add(int(times.sender[at]), "send", name, stage, chunk, times.sent_s[at], times.arrived_s[at])
        add(int(times.receiver[at]), "receive", name, stage, chunk, times.sent_s[at], times.arrived_s[at])
    for worker, one in enumerate(sums):
        for start, end in one.spans_s:
            add(worker, "data", "all-reduce", -1, -1, start, end)
        if costs.plan.training:
            add(worker, "compute", "optimizer", -1, -1, ends[worker], ends[worker] + optimizer_s(costs, worker))
    found.sort(key=lambda one: (one.worker, one.stream, one.start_s))
    return tuple(found)
