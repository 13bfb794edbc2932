"""When every action of a pipeline happens, and every message: arrays, from a list of nodes or a wavefront."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stagewright.forecast.costs import PlanCosts
from stagewright.forecast.order import BACKWARD, FORWARD, Floats, Integers, Order, forward_order, schedule_order
from stagewright.forecast.wavefront import plain_pipeline

__all__ = ["Times", "pipeline_times", "step_order"]

_MOST_NODES = 60_000  # beyond that, plain schedules are not listed node by node


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Times:
    """Actions and messages of a step, each as rows of arrays."""

    # Of each action: its worker, kind (by its place in `order.KINDS`), stage and micro-batch.
    worker: Integers
    kind: Integers
    stage: Integers
    microbatch: Integers
    # When it starts and ends.
    start_s: Floats
    end_s: Floats
    # The part of it, at its end, that is collectives of the tensor axis.
    collective_s: Floats
    # Of each message: sender, receiver, direction (FORWARD or BACKWARD), stage that made it, micro-batch.
    sender: Integers
    receiver: Integers
    direction: Integers
    origin: Integers
    message_microbatch: Integers
    # When it leaves and arrives.
    sent_s: Floats
    arrived_s: Floats

    @property
    def length_s(self) -> float:
        """When the last action ends."""
        return float(self.end_s.max(initial=0.0))

    def worker_end_s(self, worker: int) -> float:
        """When a worker's last action ends."""
        return float(self.end_s[self.worker == worker].max(initial=0.0))


def step_order(costs: PlanCosts) -> Order:
    """The order of the plan's step; inference is one stream over all its steps."""
    plan = costs.plan
    chunks = len(costs.shares)
    if plan.training:
        return schedule_order(plan.schedule, plan.stage_workers, chunks)
    return forward_order(plan.stage_workers, chunks * plan.steps)


def pipeline_times(costs: PlanCosts) -> Times:
    """The times of a plan's actions."""
    plan = costs.plan
    chunks = len(costs.shares)
    plain = plan.stage_workers == tuple(range(plan.num_stages)) and plan.schedule in ("gpipe", "1f1b")
    if plan.training and plain and 4 * plan.num_stages * chunks > _MOST_NODES:
        return _by_wavefront(costs)
    order = step_order(costs)
    compute, collective = costs.parts(order)
    start, end = order.times(compute + collective)
    action, message = ~order.is_message, order.is_message
    return Times(
        worker=order.worker[action],
        kind=order.kind[action],
        stage=order.stage[action],
        microbatch=order.microbatch[action] % chunks,
        start_s=start[action],
        end_s=end[action],
        collective_s=collective[action],
        sender=order.worker[message],
        receiver=order.receiver[message],
        direction=order.kind[message],
        origin=order.stage[message],
        message_microbatch=order.microbatch[message] % chunks,
        sent_s=start[message],
        arrived_s=end[message],
    )


def _by_wavefront(costs: PlanCosts) -> Times:
    """The same for a plain pipeline of many stages and micro-batches; micro-batches count as equally large."""
    p, m = len(costs.stages), len(costs.shares)
    small = schedule_order("gpipe", tuple(range(p)), 2)
    compute, collective = costs.parts(small)
    total = compute + collective

    def row(kind: int, chunk: int, values: Floats, *, message: bool = False) -> Floats:
        own = (small.kind == kind) & (small.microbatch == chunk) & (small.is_message == message)
        found: Floats = values[own][np.argsort(small.stage[own])]
        return found

    # Of two micro-batches, the second stands for all but the last; that one may be spared its recomputation.
    except_last = costs.plan.recompute == "except-last"
    backward = row(BACKWARD, 0 if except_last else 1, total)
    if except_last:
        backward = backward + np.array([stage.accumulate_s for stage in costs.stages])
    ahead_s, back_s = row(FORWARD, 0, total, message=True), row(BACKWARD, 0, total, message=True)
    found = plain_pipeline(
        costs.plan.schedule,
        m,
        row(FORWARD, 0, total),
        backward,
        ahead_s,
        back_s,
        backward_first_s=row(BACKWARD, 0, total),
        backward_last_s=row(BACKWARD, 1, total),
        history=True,
    )
    assert found.forward_start_s is not None
    assert found.backward_start_s is not None
    assert found.forward_end_s is not None
    assert found.backward_end_s is not None
    assert found.forward_arrival_s is not None
    assert found.backward_arrival_s is not None
    stage, chunk = (np.tile(one.reshape(-1), 2) for one in np.indices((p, m)))
    edge, message = (one.reshape(-1) for one in np.indices((p - 1, m)))
    arrived = np.concatenate([found.forward_arrival_s[1:].reshape(-1), found.backward_arrival_s[:-1].reshape(-1)])
    return Times(
        worker=stage,
        kind=np.repeat([FORWARD, BACKWARD], p * m),
        stage=stage,
        microbatch=chunk,
        start_s=np.concatenate([found.forward_start_s.reshape(-1), found.backward_start_s.reshape(-1)]),
        end_s=np.concatenate([found.forward_end_s.reshape(-1), found.backward_end_s.reshape(-1)]),
        collective_s=np.concatenate(
            [np.repeat(row(FORWARD, 0, collective), m), np.repeat(row(BACKWARD, 1, collective), m)]
        ),
        sender=np.concatenate([edge, edge + 1]),
        receiver=np.concatenate([edge + 1, edge]),
        direction=np.repeat([FORWARD, BACKWARD], (p - 1) * m),
        origin=np.concatenate([edge, edge + 1]),
        message_microbatch=np.tile(message, 2),
        sent_s=arrived - np.repeat(np.concatenate([ahead_s, back_s]), m),
        arrived_s=arrived,
    )
