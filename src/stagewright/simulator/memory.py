"""The memory of every worker over time, taken from the actions themselves.

    forward of a stage        + what it keeps for backward (its inputs alone where it is recomputed); with the model's
                              first micro-batch also the whole batch that it is a part of
    backward of a stage       first all of it where it is recomputed; gradients appear; then − what was kept
    all along                 parameters, buffers, optimiser states, posted receives; divided where they are sharded
    while a stage runs        on a GPU, and in an inference, what its operators take beside: see ``working``

So GPipe holds m micro-batches and stage i of 1F1B min(m, p − i) because their actions say so, not by a formula. Not
modelled: an allocator's fragments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stagewright.simulator.costs.plan_costs import PlanCosts
from stagewright.simulator.action_graph import (
    AHEAD,
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    IN_FLIGHT_BYTES,
    Floats,
    Integers,
)
from stagewright.simulator.step_times import StepTimes
from stagewright.simulator.costs.working_memory import NO_WORKING_MEMORY

__all__ = ["STATES", "WorkerMemory", "held_microbatches", "worker_memory"]

# States of each optimiser, each as large as the parameters.
STATES = {"sgd": 0, "adam": 2, "adamw": 2}
# Of StageWorkingMemory, as `_Nodes.rises` takes them.
_RISES = (
    "forward_bytes",
    "first_backward_bytes",
    "later_backward_bytes",
    "input_backward_bytes",
    "weight_backward_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """What a worker holds."""

    parameters_bytes: int
    """The parameters of its stages."""
    gradients_bytes: int
    """Their gradients, once they are there."""
    optimizer_bytes: int
    """The optimiser's states."""
    buffers_bytes: int
    """Buffers of its stages."""
    activations_bytes: int
    """Activations kept for backward, when they are most."""
    messages_bytes: int
    """Posted receives; of a CPU's inference, also what was sent and is not known to be there."""
    gathered_bytes: int
    """Whole parameters of the unit that is used, where they are sharded."""
    working_bytes: int
    """What operators and libraries take beside, when it is most; 0 where a worker counts only what is kept (a CPU's
    training)."""
    peak_bytes: int
    """The most of everything at once."""
    times_s: tuple[float, ...] = ()
    """Moments, and the bytes held from each on."""
    held_bytes: tuple[int, ...] = ()

    @property
    def counted_bytes(self) -> int:
        """What a worker measures of itself and holds to its limit: in a CPU's training without posted receives."""
        return self.peak_bytes if self.working_bytes else self.peak_bytes - self.messages_bytes

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "times_s": list(self.times_s), "held_bytes": list(self.held_bytes)}


def worker_memory(costs: PlanCosts, times: StepTimes, worker: int) -> WorkerMemory:
    """The memory of the worker at a place along the pipeline."""
    plan, stages = costs.plan, costs.stages
    own = [index for index, stage in enumerate(stages) if stage.worker == worker]
    divide = plan.mesh.data if plan.shard else 1
    repeated = sum(size for _, later, size in costs.common if later in own)
    once = sum(stages[index].parameter_bytes for index in own) - repeated
    parameters = -(-once // divide)
    states = STATES[plan.optimizer.name] + (plan.optimizer.momentum > 0) if plan.training else 0
    buffers = sum(stages[index].buffer_bytes for index in own)
    messages = _posted(costs, own) + _in_flight(costs, own)
    gathered = max((stages[index].gathered_bytes for index in own), default=0)
    terms = costs.model_overheads
    tells = any(stages[index].work != NO_WORKING_MEMORY for index in own)
    # Replicas of one stage have their gradients in buckets, which stay.
    bucketed = tells and costs.copies_gradients
    fixed = parameters * (1 + states) + buffers + messages + gathered
    fixed += (terms.workspace_bytes if tells else 0) + (parameters if bucketed else 0)
    # Of several micro-batches, sharded gradients are whole until the last; a CPU's own count does not see it.
    parts = 1 if tells and len(costs.shares) > 1 else divide
    moments, changes, activations, work = _changes(costs, times, worker, own, divide, parts, bucketed=bucketed)
    held = fixed + np.cumsum(changes)
    optimizer = int(parameters * terms.optimizer_working_share) if tells and plan.training else 0
    settled = int(held[-1]) if len(held) else fixed
    return WorkerMemory(
        parameters_bytes=parameters,
        gradients_bytes=parameters if plan.training else 0,
        optimizer_bytes=parameters * states,
        buffers_bytes=buffers,
        activations_bytes=activations,
        messages_bytes=messages,
        gathered_bytes=gathered,
        working_bytes=max(work, optimizer) + terms.workspace_bytes if tells else 0,
        peak_bytes=int(max(held.max(initial=0), fixed, settled + optimizer)),
        times_s=(0.0, *moments.tolist()),
        held_bytes=(int(fixed), *held.tolist()),
    )


def _posted(costs: PlanCosts, own: Sequence[int]) -> int:
    """Receives that are posted ahead, for each edge into the worker that has these stages."""
    found, ahead = 0, min(AHEAD, len(costs.shares))
    for stage in own:
        for edge, other in ((stage - 1, stage - 1), (stage, stage + 1)):
            if not 0 <= other < len(costs.stages) or other in own or (edge == stage and not costs.plan.training):
                continue
            found += ahead * int(costs.stages[edge].sends_bytes * max(costs.shares))
    return found


def _in_flight(costs: PlanCosts, own: Sequence[int]) -> int:
    """Messages of a stream that stay with their sender until there are too many: Gloo does not tell when they arrive.

    A run counts them over two batches.
    """
    if costs.plan.training or any(one.kind != "cpu" for one in costs.topology.cluster.devices):
        return 0
    found = 0
    for stage in own:
        size = int(costs.stages[stage].sends_bytes * max(costs.shares))
        if size and stage + 1 not in own:
            found += size * min(2 * len(costs.shares) - 1, max(2, IN_FLIGHT_BYTES // size))
    return found


def _changes(
    costs: PlanCosts, times: StepTimes, worker: int, own: Sequence[int], divide: int, parts: int, *, bucketed: bool
) -> tuple[Floats, Integers, int, int]:
    """Moments, what changes at each, the most that activations are, and the most that a stage takes while it runs.

    The worker has the stages ``own``. Gradients are held in ``parts`` until the last micro-batch, and divided by
    ``divide`` after it. Those that have buckets (``bucketed``) move there in the last micro-batch; of several, the
    first makes them beside.
    """
    if not costs.plan.training:
        works = [costs.stages[index].work for index in own]
        # Whoever takes results from a stream has the last one while the next is made.
        results = costs.result_bytes if own[-1] == len(costs.stages) - 1 else 0
        work = max(one.forward_bytes for one in works) + results
        work = int(max(costs.shares) * work) if any(one != NO_WORKING_MEMORY for one in works) else 0
        changed = [work, -work] if work else []
        return np.zeros(len(changed)), np.array(changed, dtype=np.int64), 0, work
    nodes = _Nodes(costs, times, worker, own)
    last_chunk = len(costs.shares) - 1
    in_place = bucketed and last_chunk == 0
    makes = nodes.first & (not in_place)
    events = _Events()
    rises = nodes.rises(makes)
    middle = nodes.start + 0.25 * (nodes.end - nodes.start)
    events.add(rises > 0, middle, rest=rises)
    events.add(rises > 0, middle, rest=-rises)
    events.add(nodes.forward, nodes.end, nodes.kept + np.where(nodes.chunk == 0, nodes.whole, 0))
    events.add((nodes.kind == BACKWARD_INPUT) & ~nodes.ends & (nodes.waits > 0), nodes.end, nodes.waits)
    # Everything is there again, for this one micro-batch. The loss goes backward before the stage does, so that what it
    # kept has gone by then.
    again = nodes.extra > 0
    events.add(again, nodes.start, nodes.extra - nodes.loss)
    kept = nodes.kept + np.where((nodes.kind == BACKWARD_WEIGHT) & (nodes.index > 0), nodes.waits, 0)
    freed = nodes.extra + kept - np.where(again, nodes.loss, 0) + np.where(nodes.chunk == last_chunk, nodes.whole, 0)
    made = np.zeros_like(freed)
    seen: set[int] = set()
    for at in np.flatnonzero(makes):
        index = int(nodes.index[at])
        seen.add(index)
        # What a stage of this worker that went backward before shares with it has its gradient already.
        there = sum(size for a, b, size in costs.common if index in (a, b) and {a, b} <= seen)
        made[at] = (costs.stages[index].parameter_bytes - there) // parts
    rise = np.minimum(made, np.maximum(0, nodes.of_stage("gradient_rise_bytes") // parts))
    events.add(nodes.first, nodes.start + 0.5 * (nodes.end - nodes.start), rest=rise)
    events.add(nodes.ends & (nodes.first | (freed != 0)), nodes.end, -freed, made - rise)
    held = nodes.of_stage("parameter_bytes")
    leaves = nodes.ends & (nodes.chunk == last_chunk)
    events.add(leaves & (parts != divide), nodes.end, rest=held // divide - held)
    events.add(leaves & (bucketed and not in_place), nodes.end, rest=-held)
    moments, activations, changes = events.in_order()
    return moments, changes, int(np.cumsum(activations).max(initial=0)), int(rises.max(initial=0))


class _Nodes:
    """The actions of one worker that change its memory, in the order of their starts, as rows of arrays.

    Of a backward in two halves the second makes the gradients and lets go. A stage that runs again does all of it in
    the first; the model's first stage, whose inputs need no gradient, in the second. The other half is left out.
    """

    def __init__(self, costs: PlanCosts, times: StepTimes, worker: int, own: Sequence[int]) -> None:
        rows = times.actions_of(worker)
        rows = rows[np.argsort(times.start_s[rows], kind="stable")]
        index, kind = times.stage[rows], times.kind[rows]
        spared = (costs.plan.recompute == "except-last") & (times.microbatch[rows] == len(costs.shares) - 1)
        again = costs.recomputed[index] & ~spared
        at_once = again & (index > 0)
        does = ~(((kind == BACKWARD_WEIGHT) & at_once) | ((kind == BACKWARD_INPUT) & (index == 0)))
        rows, self.index, self.kind, self.again, self.at_once = (
            one[does] for one in (rows, index, kind, again, at_once)
        )
        self._stages, self._place = [costs.stages[index] for index in own], np.searchsorted(own, self.index)
        self.chunk = times.microbatch[rows]
        self.start, self.end = times.start_s[rows], times.end_s[rows]
        self.share = np.array(costs.shares)[self.chunk]
        self.forward = self.kind == FORWARD
        # Whether it is the end of a backward, and the first such of its stage.
        self.ends = ~self.forward & ((self.kind != BACKWARD_INPUT) | self.at_once)
        self.first = np.zeros(len(rows), dtype=bool)
        ending = np.flatnonzero(self.ends)
        self.first[ending[np.unique(self.index[ending], return_index=True)[1]]] = True
        last = self.index == len(costs.stages) - 1
        loss = np.where(last, costs.model_overheads.loss_kept_bytes, 0)
        self.loss = self._shared(loss)
        # Inputs of the first stage are parts of what is there as one.
        self.whole = np.where(self.index == 0, costs.batch_bytes, 0)
        inputs, kept = self.of_stage("input_bytes"), self.of_stage("saved_bytes")
        self.kept = self._shared(np.where(self.again, inputs, kept) + loss)
        self.kept -= np.where(self.whole > 0, self._shared(inputs), 0)
        # Between both halves of a backward the weights' gradients wait for those of results.
        self.waits = self._shared(kept, costs.model_overheads.split_held_share)
        self.extra = np.where(self.again & self.ends, self._shared(self.of_stage("recompute_bytes")), 0)

    def of_stage(self, name: str) -> Integers:
        """A number of each action's stage."""
        found: Integers = np.array([getattr(stage, name) for stage in self._stages], dtype=np.int64)[self._place]
        return found

    def _shared(self, num_bytes: Integers, factor: float = 1.0) -> Integers:
        """Bytes of a micro-batch of the profiled size, for each action's own."""
        found: Integers = (self.share * num_bytes * factor).astype(np.int64)
        return found

    def rises(self, makes: npt.NDArray[np.bool_]) -> Integers:
        """How far memory rises while an action runs; some of them make their stage's gradients."""
        if all(stage.work == NO_WORKING_MEMORY for stage in self._stages):
            return np.zeros(len(self.index), dtype=np.int64)
        work = np.array([[getattr(stage.work, name) for name in _RISES] for stage in self._stages], dtype=np.int64)
        forward, first, later, inputs, weights = work[self._place].T
        found = np.where(self.forward, forward, np.where(makes, first, later))
        found = np.where((self.kind == BACKWARD_INPUT) & ~self.at_once, inputs, found)
        halved = (self.kind == BACKWARD_WEIGHT) & (self.index > 0)
        return self._shared(np.where(halved, np.where(makes, 0, weights), found))


class _Events:
    """What changes when: of one action in the order in which it is added."""

    def __init__(self) -> None:
        self._parts: list[tuple[Integers, Floats, Integers, Integers]] = []

    def add(
        self,
        which: npt.NDArray[np.bool_],
        moments: Floats,
        activations: Integers | None = None,
        rest: Integers | None = None,
    ) -> None:
        """Of some actions: a moment, by how much activations change then, and everything else."""
        at = np.flatnonzero(which)
        none = np.zeros(len(at), dtype=np.int64)
        parts = [none if one is None else one[at] for one in (activations, rest)]
        self._parts.append((at, moments[at], parts[0], parts[1]))

    def in_order(self) -> tuple[Floats, Integers, Integers]:
        """Moments, changes of activations and of everything, in the order of time; at one moment action by action."""
        at, moments, activations, rest = (np.concatenate(one) for one in zip(*self._parts, strict=True))
        order = np.lexsort((at, moments))
        return moments[order], activations[order], (activations + rest)[order]


def held_microbatches(times: StepTimes, stage: int) -> int:
    """The most micro-batches of a stage that are between their forward and the end of their backward."""
    own = times.stage == stage
    begun = times.end_s[own & (times.kind == FORWARD)]
    done = times.end_s[own & ((times.kind == BACKWARD) | (times.kind == BACKWARD_WEIGHT))]
    moments = np.concatenate([begun, done])
    changes = np.concatenate([np.ones(len(begun)), -np.ones(len(done))])
    order = np.lexsort((changes, moments))
    return int(np.cumsum(changes[order]).max(initial=0))
