"""The memory of every worker over time, derived from its actions.

    forward of a stage        + saved activations (only its inputs with activation checkpointing); with the first
                              micro-batch also the whole batch, of which it is a view
    backward of a stage       + recomputed activations; gradients appear (one at a time, if each is freed after the step
                              of its parameter); then − saved activations
    throughout                parameters, buffers, optimizer states, posted receives; divided by FSDP
    while a stage runs        on a GPU, and in inference, temporary memory of operators: see `costs.working_memory`

GPipe thus holds m micro-batches and stage i of 1F1B min(m, p − i) because their actions say so, not by a formula.
Fragmentation of the allocator is not modeled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stagewright.simulator.action_graph import (
    AHEAD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    IN_FLIGHT_BYTES,
    Floats,
    Integers,
)
from stagewright.simulator.costs.plan_costs import PlanCosts
from stagewright.simulator.costs.working_memory import NO_WORKING_MEMORY
from stagewright.simulator.step_times import StepTimes
from stagewright.spec.activation_checkpointing import recomputes_stages
from stagewright.spec.optimizers import OPTIMIZERS
from stagewright.spec.plan import Plan
from stagewright.spec.zero import bucket_bytes

# Fields of StageWorkingMemory that `_ActionRows.rises` reads.
_RISES = (
    "forward_bytes",
    "first_backward_bytes",
    "later_backward_bytes",
    "input_backward_bytes",
    "weight_backward_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """Memory of a worker."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    """Optimizer states."""
    buffers_bytes: int
    activations_bytes: int
    """Peak of the saved activations."""
    messages_bytes: int
    """Posted receives; in inference on a CPU also sends that may still be in flight."""
    gathered_bytes: int
    """With FSDP, gathered parameters held during a pass, or during the step."""
    working_bytes: int
    """Peak temporary memory of operators and libraries; 0 if the device counts only tensors (training on a CPU)."""
    peak_bytes: int
    times_s: tuple[float, ...] = ()
    """Times at which the memory changes."""
    held_bytes: tuple[int, ...] = ()
    """Memory from each of those times on."""

    @property
    def counted_bytes(self) -> int:
        """What a worker counts and compares with its limit: in training on a CPU without posted receives."""
        return self.peak_bytes if self.working_bytes else self.peak_bytes - self.messages_bytes

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "times_s": list(self.times_s), "held_bytes": list(self.held_bytes)}


def num_optimizer_states(plan: Plan) -> int:
    """Return the number of optimizer states per parameter."""
    if not plan.training:
        return 0
    return OPTIMIZERS[plan.optimizer.name].num_states + (plan.optimizer.momentum > 0)


def worker_memory(costs: PlanCosts, times: StepTimes, worker: int) -> WorkerMemory:
    """Predict the memory of the worker at a pipeline index."""
    plan, stages, overheads = costs.plan, costs.stages, costs.model_overheads
    own = [index for index, stage in enumerate(stages) if stage.worker == worker]
    num_shards = plan.num_shards
    shard = -(-costs.held_parameter_bytes(worker) // num_shards)
    parameters = costs.held_parameter_bytes(worker) if plan.zero else shard
    states = num_optimizer_states(plan)
    buffers = sum(stages[index].buffer_bytes for index in own)
    messages = _posted_bytes(costs, own) + _in_flight_bytes(costs, own)
    gathered = max((stages[index].gathered_bytes for index in own), default=0)
    if plan.gathers_once:
        gathered = costs.held_parameter_bytes(worker)
    has_working = any(stages[index].working_memory != NO_WORKING_MEMORY for index in own)
    # DistributedDataParallel's buckets hold the gradients of a single stage permanently.
    bucketed = has_working and costs.copies_gradients
    fixed = parameters + shard * states + buffers + messages + gathered
    fixed += (overheads.workspace_bytes if has_working else 0) + (parameters if bucketed else 0)
    fixed += costs.unsaved_batch_bytes if has_working and plan.training and 0 in own else 0
    # With several micro-batches, FSDP and ZeRO-1 keep gradients unsharded until the last.
    is_held = plan.zero == 1 or (plan.shard and not plan.scatters_every_microbatch)
    is_accumulated = plan.gathers_once or (len(costs.shares) > 1 and is_held)
    gradient_shards = 1 if is_accumulated else num_shards
    if plan.training:
        rows = _ActionRows(costs, times, worker, own)
        changes = _training_changes(costs, rows, num_shards, gradient_shards, bucketed=bucketed)
    else:
        changes = _inference_changes(costs, own)
    held = fixed + np.cumsum(changes.total)
    steps_after = plan.training and not plan.optimizer_in_backward
    optimizer = int(shard * overheads.optimizer_working_share) if has_working and steps_after else 0
    end = int(held[-1]) if len(held) else fixed
    return WorkerMemory(
        parameters_bytes=parameters,
        gradients_bytes=shard if steps_after else 0,
        optimizer_bytes=shard * states,
        buffers_bytes=buffers,
        activations_bytes=changes.peak_activations,
        messages_bytes=messages,
        gathered_bytes=gathered,
        working_bytes=max(changes.peak_working, optimizer) + overheads.workspace_bytes if has_working else 0,
        peak_bytes=int(max(held.max(initial=0), fixed, end + optimizer)),
        times_s=(0.0, *changes.times_s.tolist()),
        held_bytes=(int(fixed), *held.tolist()),
    )


def _posted_bytes(costs: PlanCosts, own: Sequence[int]) -> int:
    """Return the bytes of receives posted ahead, for each edge into the worker with the stages ``own``."""
    total, ahead = 0, min(AHEAD, len(costs.shares))
    for stage in own:
        for edge, peer in ((stage - 1, stage - 1), (stage, stage + 1)):
            if not 0 <= peer < len(costs.stages) or peer in own or (edge == stage and not costs.plan.training):
                continue
            total += ahead * int(costs.stages[edge].sent_bytes * max(costs.shares))
    return total


def _in_flight_bytes(costs: PlanCosts, own: Sequence[int]) -> int:
    """Return the bytes of a stream's sends that the sender keeps, since Gloo does not report their arrival.

    A run counts them over two batches.
    """
    if costs.plan.training or any(group.kind != "cpu" for group in costs.topology.cluster.devices):
        return 0
    total = 0
    for stage in own:
        size = int(costs.stages[stage].sent_bytes * max(costs.shares))
        if size and stage + 1 not in own:
            total += size * min(2 * len(costs.shares) - 1, max(2, IN_FLIGHT_BYTES // size))
    return total


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Changes:
    """Changes of a worker's memory over time."""

    times_s: Floats
    total: Integers
    """The change at each time."""
    peak_activations: int
    peak_working: int


def _inference_changes(costs: PlanCosts, own: Sequence[int]) -> _Changes:
    memories = [costs.stages[index].working_memory for index in own]
    # The consumer of a stream holds the last output while the next one is computed.
    outputs = costs.output_bytes if own[-1] == len(costs.stages) - 1 else 0
    working = 0
    if any(memory != NO_WORKING_MEMORY for memory in memories):
        working = int(max(costs.shares) * (max(memory.forward_bytes for memory in memories) + outputs))
    total = np.array([working, -working] if working else [], dtype=np.int64)
    return _Changes(times_s=np.zeros(len(total)), total=total, peak_activations=0, peak_working=working)


def _training_changes(
    costs: PlanCosts, rows: _ActionRows, num_shards: int, gradient_shards: int, *, bucketed: bool
) -> _Changes:
    """Return the changes of a training step.

    Gradients are held in ``gradient_shards`` until the last micro-batch, and in ``num_shards`` afterwards.
    ``bucketed`` gradients move into the buckets with the last micro-batch; with several micro-batches the first one
    allocates them separately.
    """
    last_microbatch = len(costs.shares) - 1
    in_place = bucketed and last_microbatch == 0
    allocates = rows.first & (not in_place)
    events = _Events()
    rises = rows.rises(allocates)
    duration = rows.end - rows.start
    events.add(rises > 0, rows.start + 0.25 * duration, rest=rises)
    events.add(rises > 0, rows.start + 0.25 * duration, rest=-rises)
    for index, is_gathered in enumerate((rows.forward, rows.ends)):
        gathered = rows.gather_rise(index)
        for change in (gathered, -gathered):
            events.add(is_gathered & (gathered != 0), rows.start + 0.25 * duration, rest=change)
    # Units are recomputed one at a time, as later ones are freed; the first backward also allocates gradients.
    unit_rise, gradient_rise = rows.unit_rises(allocates)
    for sign in (1, -1):
        events.add(unit_rise + gradient_rise > 0, rows.start + 0.5 * duration, sign * unit_rise, sign * gradient_rise)
    events.add(rows.forward, rows.end, rows.saved + np.where(rows.microbatch == 0, rows.batch, 0))
    events.add((rows.kind == BACKWARD_INPUT) & ~rows.ends & (rows.pending > 0), rows.end, rows.pending)
    # Recomputation restores the activations of this micro-batch. The loss backward has freed its activations by then.
    recomputes = rows.recomputed > 0
    events.add(recomputes, rows.start, rows.recomputed - rows.loss)
    freed = rows.recomputed + rows.saved - np.where(recomputes, rows.loss, 0)
    freed += np.where((rows.kind == BACKWARD_WEIGHT) & (rows.index > 0), rows.pending, 0)
    freed += np.where(rows.microbatch == last_microbatch, rows.batch, 0)
    allocated = _allocated_gradients(costs, rows, allocates) // gradient_shards
    rise = np.minimum(allocated, np.maximum(0, rows.of_stage("gradient_rise_bytes") // gradient_shards))
    if costs.plan.optimizer_in_backward:
        allocated = np.zeros_like(allocated)  # freed as soon as their parameters are stepped
    events.add(rows.first, rows.start + 0.5 * duration, rest=rise)
    events.add(rows.ends & (rows.first | (freed != 0)), rows.end, -freed, allocated - rise)
    parameters = rows.of_stage("parameter_bytes")
    last = rows.ends & (rows.microbatch == last_microbatch)
    events.add(last & (gradient_shards != num_shards), rows.end, rest=parameters // num_shards - parameters)
    events.add(last & costs.plan.gathers_once, rows.end, rest=-_own_parameters(costs, rows))
    events.add(last & (bucketed and not in_place), rows.end, rest=-parameters)
    if costs.plan.zero:
        scatters = rows.ends & (last | (costs.plan.zero == 2))
        for in_flight, times in zip(
            _zero_in_flight(costs, rows), (rows.start + 0.25 * duration, rows.end), strict=True
        ):
            events.add(scatters, times, rest=in_flight)
            events.add(scatters, times, rest=-in_flight)
    times_s, activations, total = events.in_order()
    return _Changes(
        times_s=times_s,
        total=total,
        peak_activations=int(np.cumsum(activations).max(initial=0)),
        peak_working=int(rises.max(initial=0)),
    )


def _zero_in_flight(costs: PlanCosts, rows: _ActionRows) -> tuple[Integers, Integers]:
    """Return the memory of ZeRO's reduce-scatters above shards and activations, early in a backward and at its end.

    One bucket is in flight, with a buffer for its result, while another fills up. By the time that the first is sent,
    backward has freed the activations of its layers. With several stages or a split backward, the gradients of a stage
    are sent when its backward is done.
    """
    parameters = rows.of_stage("parameter_bytes")
    bucket = bucket_bytes(int(parameters[np.unique(rows.index, return_index=True)[1]].sum()))
    if len(np.unique(rows.index)) > 1 or (rows.kind == BACKWARD_WEIGHT).any():
        return np.zeros_like(parameters), parameters + 2 * bucket
    is_accumulated = costs.plan.zero == 1 and len(costs.shares) > 1  # full gradients are counted already
    freed = bucket * (rows.saved + rows.recomputed) // np.maximum(1, parameters)
    early: Integers = np.maximum(0, bucket * (2 if is_accumulated else 5) // 2 - freed)
    return early, np.minimum(3 * parameters, (2 if is_accumulated else 3) * bucket)


def _own_parameters(costs: PlanCosts, rows: _ActionRows) -> Integers:
    """Return the parameter bytes of each action's stage, without those that it shares with an earlier one."""
    shared = np.zeros(len(costs.stages), dtype=np.int64)
    for parameter in costs.shared_parameters:
        shared[parameter.later] += parameter.num_bytes
    own: Integers = rows.of_stage("parameter_bytes") - shared[rows.index]
    return own


def _allocated_gradients(costs: PlanCosts, rows: _ActionRows, allocates: npt.NDArray[np.bool_]) -> Integers:
    """Return the gradient bytes that each action allocates; a parameter shared by two stages is allocated once."""
    allocated = np.zeros(len(rows.index), dtype=np.int64)
    seen: set[int] = set()
    for row in np.flatnonzero(allocates):
        index = int(rows.index[row])
        seen.add(index)
        existing = sum(
            parameter.num_bytes
            for parameter in costs.shared_parameters
            if index in (parameter.earlier, parameter.later) and {parameter.earlier, parameter.later} <= seen
        )
        allocated[row] = costs.stages[index].parameter_bytes - existing
    return allocated


class _ActionRows:
    """The actions of one worker that change its memory, in the order of their starts, as rows of arrays.

    The second half of a split backward makes the gradients and frees activations. A recomputed stage does all of it in
    the first half; the model's first stage, whose inputs need no gradient, in the second. The other half is left out.
    """

    def __init__(self, costs: PlanCosts, times: StepTimes, worker: int, own: Sequence[int]) -> None:
        rows = times.actions_of(worker)
        rows = rows[np.argsort(times.start_s[rows], kind="stable")]
        index, kind = times.stage[rows], times.kind[rows]
        exempt = (costs.plan.recompute == "except-last") & (times.microbatch[rows] == len(costs.shares) - 1)
        recomputes = costs.recomputed[index] & ~exempt
        unsplit = recomputes & (index > 0)
        active = ~(((kind == BACKWARD_WEIGHT) & unsplit) | ((kind == BACKWARD_INPUT) & (index == 0)))
        rows, self.index, self.kind, recomputes, self.unsplit = (
            column[active] for column in (rows, index, kind, recomputes, unsplit)
        )
        self._stages, self._position = [costs.stages[index] for index in own], np.searchsorted(own, self.index)
        self.microbatch = times.microbatch[rows]
        self.start, self.end = times.start_s[rows], times.end_s[rows]
        self.share = np.array(costs.shares)[self.microbatch]
        self.forward = self.kind == FORWARD
        # Whether it ends a backward, and is the first to do so on its stage.
        self.ends = ~self.forward & ((self.kind != BACKWARD_INPUT) | self.unsplit)
        self.first = np.zeros(len(rows), dtype=bool)
        ending = np.flatnonzero(self.ends)
        self.first[ending[np.unique(self.index[ending], return_index=True)[1]]] = True
        loss = np.where(self.index == len(costs.stages) - 1, costs.model_overheads.loss_kept_bytes, 0)
        self.loss = self._of_microbatch(loss)
        # The first stage's inputs are views of the whole batch.
        self.batch = np.where(self.index == 0, costs.batch_input_bytes, 0)
        inputs, saved = self.of_stage("input_bytes"), self.of_stage("saved_bytes")
        held = np.array([stage.recomputation.held_bytes for stage in self._stages], dtype=np.int64)[self._position]
        self.saved = self._of_microbatch(np.where(recomputes, held, saved) + loss)
        self.saved -= np.where(self.batch > 0, self._of_microbatch(inputs), 0)
        # Output gradients kept between the halves of a split backward for the weight gradients.
        self.pending = self._of_microbatch(saved, costs.model_overheads.split_held_share)
        recomputed = self._of_microbatch(self.of_stage("recompute_bytes"))
        is_whole = recomputes & self.ends & recomputes_stages(costs.plan)
        self.recomputed = np.where(is_whole, recomputed, 0)
        self._by_unit = recomputes & self.ends & ~is_whole

    def of_stage(self, name: str) -> Integers:
        """Return a field of each action's stage."""
        values: Integers = np.array([getattr(stage, name) for stage in self._stages], dtype=np.int64)[self._position]
        return values

    def gather_rise(self, index: int) -> Integers:
        """Return the gathered parameters of one unit during each action: in forward (0) or backward (1)."""
        values = [stage.gather_rise_bytes[index] for stage in self._stages]
        rises: Integers = np.array(values, dtype=np.int64)[self._position]
        return rises

    def unit_rises(self, allocates: npt.NDArray[np.bool_]) -> tuple[Integers, Integers]:
        """Return the rise of each action while units are recomputed: activations, and gradients on top of them."""
        values = [(stage.recomputation.rise_bytes, stage.recomputation.first_rise_bytes) for stage in self._stages]
        later, first = np.array(values, dtype=np.int64)[self._position].T
        activations = np.where(self._by_unit, self._of_microbatch(later), 0)
        gradients = np.where(self._by_unit & allocates, self._of_microbatch(first) - activations, 0)
        return activations, gradients

    def _of_microbatch(self, num_bytes: Integers, factor: float = 1.0) -> Integers:
        """Scale bytes of a micro-batch of the profiled size to each action's micro-batch."""
        scaled: Integers = (self.share * num_bytes * factor).astype(np.int64)
        return scaled

    def rises(self, allocates: npt.NDArray[np.bool_]) -> Integers:
        """Return the temporary memory of each action; ``allocates``: the actions that allocate gradients."""
        if all(stage.working_memory == NO_WORKING_MEMORY for stage in self._stages):
            return np.zeros(len(self.index), dtype=np.int64)
        rises = np.array(
            [[getattr(stage.working_memory, name) for name in _RISES] for stage in self._stages], dtype=np.int64
        )
        forward, first, later, inputs, weights = rises[self._position].T
        rise = np.where(self.forward, forward, np.where(allocates, first, later))
        rise = np.where((self.kind == BACKWARD_INPUT) & ~self.unsplit, inputs, rise)
        is_weight_half = (self.kind == BACKWARD_WEIGHT) & (self.index > 0)
        return self._of_microbatch(np.where(is_weight_half, np.where(allocates, 0, weights), rise))


class _Events:
    """Memory changes; those of one action keep the order in which they are added."""

    def __init__(self) -> None:
        self._events: list[tuple[Integers, Floats, Integers, Integers]] = []

    def add(
        self,
        selected: npt.NDArray[np.bool_],
        times_s: Floats,
        activations: Integers | None = None,
        rest: Integers | None = None,
    ) -> None:
        """Add changes of the selected actions: their times, the change of activations and of everything else."""
        rows = np.flatnonzero(selected)
        none = np.zeros(len(rows), dtype=np.int64)
        changes = [none if change is None else change[rows] for change in (activations, rest)]
        self._events.append((rows, times_s[rows], changes[0], changes[1]))

    def in_order(self) -> tuple[Floats, Integers, Integers]:
        """Return times, changes of activations and of everything, by time, then by action."""
        rows, times_s, activations, rest = (np.concatenate(column) for column in zip(*self._events, strict=True))
        order = np.lexsort((rows, times_s))
        return times_s[order], activations[order], (activations + rest)[order]
