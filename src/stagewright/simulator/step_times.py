"""Start and end times of every action and P2P transfer of a step, from the action graph or the wavefront."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from stagewright.simulator.action_graph import (
    BACKWARD,
    FORWARD,
    ActionGraph,
    Floats,
    Integers,
    inference_graph,
    training_graph,
)
from stagewright.simulator.costs.plan_costs import PlanCosts
from stagewright.simulator.wavefront import WavefrontTimes, simulate_wavefront

_MAX_NODES = 60_000  # larger GPipe and 1F1B pipelines use the wavefront


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTimes:
    """Actions and P2P transfers of a step, as rows of arrays."""

    worker: Integers
    """Worker of each action."""
    kind: Integers
    """Kind of each action, by its index in `action_graph.KINDS`."""
    stage: Integers
    microbatch: Integers
    start_s: Floats
    end_s: Floats
    collective_s: Floats
    """Tensor all-reduces at the end of the action, included in it."""
    sender: Integers
    """Sender of each transfer."""
    receiver: Integers
    direction: Integers
    """FORWARD or BACKWARD."""
    origin: Integers
    """The producing stage."""
    p2p_microbatch: Integers
    """Micro-batch of each transfer."""
    sent_s: Floats
    arrived_s: Floats
    _rows: dict[str, list[Integers]] = field(init=False, repr=False, default_factory=dict)

    @property
    def length_s(self) -> float:
        """End of the last action."""
        return float(self.end_s.max(initial=0.0))

    def worker_end_s(self, worker: int) -> float:
        """Return the end of a worker's last action."""
        return float(self.end_s[self.actions_of(worker)].max(initial=0.0))

    def actions_of(self, worker: int) -> Integers:
        """Return the rows of a worker's actions."""
        return self._rows_of("worker", worker)

    def sent_by(self, worker: int) -> Integers:
        """Return the rows of a worker's sends."""
        return self._rows_of("sender", worker)

    def received_by(self, worker: int) -> Integers:
        """Return the rows of a worker's receives."""
        return self._rows_of("receiver", worker)

    def _rows_of(self, role: str, worker: int) -> Integers:
        """Return the rows with a worker in a role. Sorting once for all workers avoids a scan per worker."""
        if role not in self._rows:
            workers: Integers = getattr(self, role)
            rows = np.argsort(workers, kind="stable")
            num_workers = int(self.worker.max(initial=0)) + 1
            self._rows[role] = np.split(rows, np.searchsorted(workers[rows], np.arange(1, num_workers)))
        return self._rows[role][worker]


def step_graph(costs: PlanCosts) -> ActionGraph:
    """Build the action graph of a plan's step; inference is one stream over all its steps."""
    plan, num_microbatches = costs.plan, len(costs.shares)
    if plan.training:
        return training_graph(plan.schedule, plan.stage_workers, num_microbatches, plan.actions)
    return inference_graph(plan.stage_workers, num_microbatches * plan.steps)


def pipeline_times(costs: PlanCosts) -> StepTimes:
    """Compute the times of a plan's actions and transfers."""
    if _is_large(costs):
        return _by_wavefront(costs)
    num_microbatches = len(costs.shares)
    graph = step_graph(costs)
    compute, collective = costs.node_times(graph)
    start, end = graph.times(compute + collective)
    action, p2p = ~graph.is_p2p, graph.is_p2p
    return StepTimes(
        worker=graph.worker[action],
        kind=graph.kind[action],
        stage=graph.stage[action],
        microbatch=graph.microbatch[action] % num_microbatches,
        start_s=start[action],
        end_s=end[action],
        collective_s=collective[action],
        sender=graph.worker[p2p],
        receiver=graph.receiver[p2p],
        direction=graph.kind[p2p],
        origin=graph.stage[p2p],
        p2p_microbatch=graph.microbatch[p2p] % num_microbatches,
        sent_s=start[p2p],
        arrived_s=end[p2p],
    )


def worker_ends_s(costs: PlanCosts) -> list[float]:
    """Return the end of each worker's last action; faster than all times for a large pipeline."""
    if _is_large(costs):
        return [float(end) for end in _run_wavefront(costs, _TwoMicrobatches(costs), history=False).end_s]
    times = pipeline_times(costs)
    return [times.worker_end_s(worker) for worker in range(costs.plan.mesh.pipeline)]


def _is_large(costs: PlanCosts) -> bool:
    """Whether it is a GPipe or 1F1B pipeline with one stage per worker, too large for the action graph."""
    plan = costs.plan
    supported = plan.stage_workers == tuple(range(plan.num_stages)) and plan.schedule in ("gpipe", "1f1b")
    return plan.training and supported and 4 * plan.num_stages * len(costs.shares) > _MAX_NODES


class _TwoMicrobatches:
    """Durations of each stage's actions and transfers; two micro-batches represent all."""

    def __init__(self, costs: PlanCosts) -> None:
        self.graph = training_graph("gpipe", tuple(range(len(costs.stages))), 2)
        compute, self.collective = costs.node_times(self.graph)
        self.total = compute + self.collective

    def row(self, kind: int, microbatch: int, values: Floats, *, p2p: bool = False) -> Floats:
        graph = self.graph
        selected = (graph.kind == kind) & (graph.microbatch == microbatch) & (graph.is_p2p == p2p)
        by_stage: Floats = values[selected][np.argsort(graph.stage[selected])]
        return by_stage

    def action_s(self, kind: int, microbatch: int) -> Floats:
        return self.row(kind, microbatch, self.total)

    def p2p_s(self, kind: int) -> Floats:
        return self.row(kind, 0, self.total, p2p=True)


def _run_wavefront(costs: PlanCosts, two: _TwoMicrobatches, *, history: bool) -> WavefrontTimes:
    # The second micro-batch represents all but the last, which may skip recomputation.
    except_last = costs.plan.recompute == "except-last"
    backward = two.action_s(BACKWARD, 0 if except_last else 1)
    if except_last:
        backward = backward + np.array([stage.accumulate_s for stage in costs.stages])
    return simulate_wavefront(
        costs.plan.schedule,
        len(costs.shares),
        two.action_s(FORWARD, 0),
        backward,
        two.p2p_s(FORWARD),
        two.p2p_s(BACKWARD),
        backward_first_s=two.action_s(BACKWARD, 0),
        backward_last_s=two.action_s(BACKWARD, 1),
        history=history,
    )


def _by_wavefront(costs: PlanCosts) -> StepTimes:
    """Compute the times of a large pipeline; its micro-batches count as equally large."""
    p, m = len(costs.stages), len(costs.shares)
    two = _TwoMicrobatches(costs)
    times = _run_wavefront(costs, two, history=True)
    assert times.forward_start_s is not None
    assert times.backward_start_s is not None
    assert times.forward_end_s is not None
    assert times.backward_end_s is not None
    assert times.forward_arrival_s is not None
    assert times.backward_arrival_s is not None
    stage, microbatch = (np.tile(index.reshape(-1), 2) for index in np.indices((p, m)))
    edge, edge_microbatch = (index.reshape(-1) for index in np.indices((p - 1, m)))
    arrived = np.concatenate([times.forward_arrival_s[1:].reshape(-1), times.backward_arrival_s[:-1].reshape(-1)])
    return StepTimes(
        worker=stage,
        kind=np.repeat([FORWARD, BACKWARD], p * m),
        stage=stage,
        microbatch=microbatch,
        start_s=np.concatenate([times.forward_start_s.reshape(-1), times.backward_start_s.reshape(-1)]),
        end_s=np.concatenate([times.forward_end_s.reshape(-1), times.backward_end_s.reshape(-1)]),
        collective_s=np.concatenate(
            [np.repeat(two.row(kind, index, two.collective), m) for kind, index in ((FORWARD, 0), (BACKWARD, 1))]
        ),
        sender=np.concatenate([edge, edge + 1]),
        receiver=np.concatenate([edge + 1, edge]),
        direction=np.repeat([FORWARD, BACKWARD], (p - 1) * m),
        origin=np.concatenate([edge, edge + 1]),
        p2p_microbatch=np.tile(edge_microbatch, 2),
        sent_s=arrived - np.repeat(np.concatenate([two.p2p_s(FORWARD), two.p2p_s(BACKWARD)]), m),
        arrived_s=arrived,
    )
