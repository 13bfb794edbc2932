"""When every action of a pipeline happens, and every message: arrays, from a list of nodes or a wavefront."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from stagewright.simulator.costs.plan_costs import PlanCosts
from stagewright.simulator.action_graph import BACKWARD, FORWARD, Floats, Integers, ActionGraph, inference_graph, training_graph
from stagewright.simulator.wavefront import WavefrontTimes, simulate_wavefront

__all__ = ["StepTimes", "pipeline_times", "step_order", "worker_ends_s"]

_MOST_NODES = 60_000  # beyond that, plain schedules are not listed node by node


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTimes:
    """Actions and messages of a step, each as rows of arrays."""

    worker: Integers
    """Of each action: its worker, kind (by its place in `order.KINDS`), stage and micro-batch."""
    kind: Integers
    stage: Integers
    microbatch: Integers
    start_s: Floats
    """When it starts and ends."""
    end_s: Floats
    collective_s: Floats
    """The part of it, at its end, that is collectives of the tensor axis."""
    sender: Integers
    """Of each message: sender, receiver, direction (FORWARD or BACKWARD), stage that made it, micro-batch."""
    receiver: Integers
    direction: Integers
    origin: Integers
    message_microbatch: Integers
    sent_s: Floats
    """When it leaves and arrives."""
    arrived_s: Floats
    _rows: dict[str, list[Integers]] = field(init=False, repr=False, default_factory=dict)
    """Rows by worker, as they are asked for."""

    @property
    def length_s(self) -> float:
        """When the last action ends."""
        return float(self.end_s.max(initial=0.0))

    def worker_end_s(self, worker: int) -> float:
        """When a worker's last action ends."""
        return float(self.end_s[self.actions_of(worker)].max(initial=0.0))

    def actions_of(self, worker: int) -> Integers:
        """The rows of a worker's actions."""
        return self._rows_of("worker", worker)

    def sent_by(self, worker: int) -> Integers:
        """The rows of messages that a worker sends."""
        return self._rows_of("sender", worker)

    def received_by(self, worker: int) -> Integers:
        """The rows of messages that a worker receives."""
        return self._rows_of("receiver", worker)

    def _rows_of(self, whose: str, worker: int) -> Integers:
        """Sorted once for all workers: to look through everything for each takes minutes where there are thousands."""
        if whose not in self._rows:
            workers: Integers = getattr(self, whose)
            rows = np.argsort(workers, kind="stable")
            num_workers = int(self.worker.max(initial=0)) + 1
            self._rows[whose] = np.split(rows, np.searchsorted(workers[rows], np.arange(1, num_workers)))
        return self._rows[whose][worker]


def step_order(costs: PlanCosts) -> ActionGraph:
    """The order of the plan's step; inference is one stream over all its steps."""
    plan = costs.plan
    chunks = len(costs.shares)
    if plan.training:
        return training_graph(plan.schedule, plan.stage_workers, chunks)
    return inference_graph(plan.stage_workers, chunks * plan.steps)


def pipeline_times(costs: PlanCosts) -> StepTimes:
    """The times of a plan's actions."""
    if _is_large(costs):
        return _by_wavefront(costs)
    chunks = len(costs.shares)
    order = step_order(costs)
    compute, collective = costs.parts(order)
    start, end = order.times(compute + collective)
    action, message = ~order.is_p2p, order.is_p2p
    return StepTimes(
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


def worker_ends_s(costs: PlanCosts) -> list[float]:
    """When each worker's last action ends; of a large pipeline sooner known than all its times."""
    if _is_large(costs):
        return [float(one) for one in _wavefront(costs, _TwoMicrobatches(costs), history=False).end_s]
    times = pipeline_times(costs)
    return [times.worker_end_s(worker) for worker in range(costs.plan.mesh.pipeline)]


def _is_large(costs: PlanCosts) -> bool:
    """Whether it is a plain pipeline with too many nodes to list them."""
    plan = costs.plan
    plain = plan.stage_workers == tuple(range(plan.num_stages)) and plan.schedule in ("gpipe", "1f1b")
    return plan.training and plain and 4 * plan.num_stages * len(costs.shares) > _MOST_NODES


class _TwoMicrobatches:
    """Durations of a plain pipeline's actions and messages, stage by stage; two micro-batches stand for all."""

    def __init__(self, costs: PlanCosts) -> None:
        self.order = training_graph("gpipe", tuple(range(len(costs.stages))), 2)
        compute, self.collective = costs.parts(self.order)
        self.total = compute + self.collective

    def row(self, kind: int, chunk: int, values: Floats, *, message: bool = False) -> Floats:
        order = self.order
        own = (order.kind == kind) & (order.microbatch == chunk) & (order.is_p2p == message)
        found: Floats = values[own][np.argsort(order.stage[own])]
        return found

    def action_s(self, kind: int, chunk: int) -> Floats:
        return self.row(kind, chunk, self.total)

    def message_s(self, kind: int) -> Floats:
        return self.row(kind, 0, self.total, message=True)


def _wavefront(costs: PlanCosts, two: _TwoMicrobatches, *, history: bool) -> WavefrontTimes:
    # The second micro-batch stands for all but the last; that one may be spared its recomputation.
    except_last = costs.plan.recompute == "except-last"
    backward = two.action_s(BACKWARD, 0 if except_last else 1)
    if except_last:
        backward = backward + np.array([stage.accumulate_s for stage in costs.stages])
    return simulate_wavefront(
        costs.plan.schedule,
        len(costs.shares),
        two.action_s(FORWARD, 0),
        backward,
        two.message_s(FORWARD),
        two.message_s(BACKWARD),
        backward_first_s=two.action_s(BACKWARD, 0),
        backward_last_s=two.action_s(BACKWARD, 1),
        history=history,
    )


def _by_wavefront(costs: PlanCosts) -> StepTimes:
    """The times of a plain pipeline of many stages and micro-batches; micro-batches count as equally large."""
    p, m = len(costs.stages), len(costs.shares)
    two = _TwoMicrobatches(costs)
    found = _wavefront(costs, two, history=True)
    assert found.forward_start_s is not None
    assert found.backward_start_s is not None
    assert found.forward_end_s is not None
    assert found.backward_end_s is not None
    assert found.forward_arrival_s is not None
    assert found.backward_arrival_s is not None
    stage, microbatch = (np.tile(one.reshape(-1), 2) for one in np.indices((p, m)))
    edge, message = (one.reshape(-1) for one in np.indices((p - 1, m)))
    arrived = np.concatenate([found.forward_arrival_s[1:].reshape(-1), found.backward_arrival_s[:-1].reshape(-1)])
    return StepTimes(
        worker=stage,
        kind=np.repeat([FORWARD, BACKWARD], p * m),
        stage=stage,
        microbatch=microbatch,
        start_s=np.concatenate([found.forward_start_s.reshape(-1), found.backward_start_s.reshape(-1)]),
        end_s=np.concatenate([found.forward_end_s.reshape(-1), found.backward_end_s.reshape(-1)]),
        collective_s=np.concatenate(
            [np.repeat(two.row(kind, chunk, two.collective), m) for kind, chunk in ((FORWARD, 0), (BACKWARD, 1))]
        ),
        sender=np.concatenate([edge, edge + 1]),
        receiver=np.concatenate([edge + 1, edge]),
        direction=np.repeat([FORWARD, BACKWARD], (p - 1) * m),
        origin=np.concatenate([edge, edge + 1]),
        message_microbatch=np.tile(message, 2),
        sent_s=arrived - np.repeat(np.concatenate([two.message_s(FORWARD), two.message_s(BACKWARD)]), m),
        arrived_s=arrived,
    )
