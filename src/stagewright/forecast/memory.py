"""The memory of every worker over time, taken from the actions themselves.

    forward of a stage        + what it keeps for backward (its inputs alone where it is recomputed); with the model's
                              first micro-batch also the whole batch that it is a part of
    backward of a stage       first all of it where it is recomputed; gradients appear; then − what was kept
    all along                 parameters, buffers, optimiser states, posted receives; divided where they are sharded
    while a stage runs        on a GPU, what its operators take beside: see ``working``

So GPipe holds m micro-batches and stage i of 1F1B min(m, p − i) because their actions say so, not by a formula. Not
modelled: an allocator's fragments.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from stagewright.forecast.costs import PlanCosts
from stagewright.forecast.order import AHEAD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Floats, Integers
from stagewright.forecast.times import Times
from stagewright.forecast.working import NO_WORK

__all__ = ["STATES", "WorkerMemory", "held_microbatches", "worker_memory"]

# States of each optimiser, each as large as the parameters.
STATES = {"sgd": 0, "adam": 2, "adamw": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """What a worker holds."""

    # The parameters of its stages.
    parameters_bytes: int
    # Their gradients, once they are there.
    gradients_bytes: int
    # The optimiser's states.
    optimizer_bytes: int
    # Buffers of its stages.
    buffers_bytes: int
    # Activations kept for backward, when they are most.
    activations_bytes: int
    # Posted receives.
    messages_bytes: int
    # Whole parameters of the unit that is used, where they are sharded.
    gathered_bytes: int
    # What operators and libraries take beside, when it is most; 0 where a worker counts its own tensors only (a CPU).
    working_bytes: int
    # The most of everything at once.
    peak_bytes: int
    # Moments, and the bytes held from each on.
    times_s: tuple[float, ...] = ()
    held_bytes: tuple[int, ...] = ()

    @property
    def counted_bytes(self) -> int:
        """What a worker measures of itself and holds to its limit: on a CPU without posted receives."""
        return self.peak_bytes if self.working_bytes else self.peak_bytes - self.messages_bytes

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "times_s": list(self.times_s), "held_bytes": list(self.held_bytes)}


def worker_memory(costs: PlanCosts, times: Times, worker: int) -> WorkerMemory:
    """The memory of the worker at a place along the pipeline."""
    plan, stages = costs.plan, costs.stages
    own = [index for index, stage in enumerate(stages) if stage.worker == worker]
    divide = plan.mesh.data if plan.shard else 1
    repeated = sum(size for _, later, size in costs.common if later in own)
    once = sum(stages[index].parameter_bytes for index in own) - repeated
    parameters = -(-once // divide)
    states = STATES[plan.optimizer.name] + (plan.optimizer.momentum > 0) if plan.training else 0
    buffers = sum(stages[index].buffer_bytes for index in own)
    messages = _posted(costs, worker)
    gathered = max((stages[index].gathered_bytes for index in own), default=0)
    terms = costs.model_terms
    tells = any(stages[index].work != NO_WORK for index in own)
    # Replicas of one stage have their gradients in buckets, which stay.
    bucketed = tells and costs.copies_gradients
    fixed = parameters * (1 + states) + buffers + messages + gathered
    fixed += (terms.workspace_bytes if tells else 0) + (parameters if bucketed else 0)
    # Of several micro-batches, sharded gradients are whole until the last; a CPU's own count does not see it.
    parts = 1 if tells and len(costs.shares) > 1 else divide
    moments, changes, activations, work = _changes(costs, times, worker, divide, parts, bucketed=bucketed)
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
        times_s=(0.0, *(float(one) for one in moments)),
        held_bytes=(int(fixed), *(int(one) for one in held)),
    )


def _posted(costs: PlanCosts, worker: int) -> int:
    """Receives that are posted ahead, for each edge into the worker."""
    found = 0
    for edge in range(len(costs.stages) - 1):
        before, behind = costs.stages[edge], costs.stages[edge + 1]
        if before.worker == behind.worker:
            continue
        ahead = min(AHEAD, len(costs.shares))
        if behind.worker == worker:
            found += ahead * int(before.sends_bytes * max(costs.shares))
        if before.worker == worker and costs.plan.training:
            found += ahead * int(before.sends_bytes * max(costs.shares))
    return found


def _changes(
    costs: PlanCosts, times: Times, worker: int, divide: int, parts: int, *, bucketed: bool
) -> tuple[Floats, Integers, int, int]:
    """Moments, what changes at each, the most that activations are, and the most that a stage takes while it runs.

    Gradients are held in ``parts`` until the last micro-batch, and divided by ``divide`` after it. Those that have
    buckets (``bucketed``) move there in the last micro-batch; of several, the first makes them beside.
    """
    if not costs.plan.training:
        own = [stage for stage in costs.stages if stage.worker == worker]
        # Whoever takes results from a stream has the last one while the next is made.
        work = max(stage.work.forward_bytes for stage in own) + (costs.result_bytes if costs.stages[-1] in own else 0)
        work = int(max(costs.shares) * work) if any(stage.work != NO_WORK for stage in own) else 0
        changed = [work, -work] if work else []
        return np.zeros(len(changed)), np.array(changed, dtype=np.int64), 0, work
    moments: list[float] = []
    changes: list[tuple[int, int]] = []  # activations, the rest
    most = 0
    seen: set[int] = set()
    mine = times.actions_of(worker)
    last_chunk = len(costs.shares) - 1
    in_place = bucketed and last_chunk == 0
    for node in mine[np.argsort(times.start_s[mine], kind="stable")]:
        index, kind, chunk = int(times.stage[node]), int(times.kind[node]), int(times.microbatch[node])
        stage, share = costs.stages[index], costs.shares[chunk]
        again = costs.recomputes(index)
        if costs.plan.recompute == "except-last" and chunk == last_chunk:
            again = False
        loss = costs.model_terms.loss_kept_bytes if index == len(costs.stages) - 1 else 0
        whole = costs.batch_bytes if index == 0 else 0  # its inputs are parts of what is there as one
        kept = int(share * ((stage.input_bytes if again else stage.kept_bytes) + loss))
        kept -= int(share * stage.input_bytes) if whole else 0
        # Of a backward in two halves the second makes the gradients and lets go. A stage that runs again does all of it
        # in the first; the model's first stage, whose inputs need no gradient, in the second. The other half is empty.
        at_once = again and index > 0
        if (kind == BACKWARD_WEIGHT and at_once) or (kind == BACKWARD_INPUT and index == 0):
            continue
        start, end = float(times.start_s[node]), float(times.end_s[node])
        rises = stage.work.forward_bytes
        if kind != FORWARD:
            makes = index not in seen and not in_place and (kind != BACKWARD_INPUT or at_once)
            rises = stage.work.first_backward_bytes if makes else stage.work.later_backward_bytes
            if kind == BACKWARD_INPUT and not at_once:
                rises = stage.work.input_backward_bytes
            elif kind == BACKWARD_WEIGHT and index > 0:
                rises = 0 if makes else stage.work.weight_backward_bytes
        if rises:
            rises = int(share * rises)
            most = max(most, rises)
            middle = start + 0.25 * (end - start)
            moments += [middle, middle]
            changes += [(0, rises), (0, -rises)]
        if kind == FORWARD:
            moments.append(end)
            changes.append((kept + (whole if chunk == 0 else 0), 0))
        elif kind in (BACKWARD, BACKWARD_WEIGHT, BACKWARD_INPUT):
            ends = kind != BACKWARD_INPUT or at_once
            # Between both halves of a backward the weights' gradients wait for those of results.
            waits = int(share * stage.kept_bytes * costs.model_terms.split_held_share)
            if kind == BACKWARD_INPUT and not ends and waits:
                moments.append(end)
                changes.append((waits, 0))
            elif kind == BACKWARD_WEIGHT and index > 0:
                kept += waits
            extra = int(share * stage.again_bytes) if again and ends else 0
            if extra:
                # Everything is there again, for this one micro-batch. The loss goes backward before the stage does, so
                # that what it kept has gone by then.
                moments.append(start)
                changes.append((extra - int(share * loss), 0))
                kept -= int(share * loss)
            freed = extra + kept + (whole if chunk == last_chunk else 0) if ends else 0
            if ends and index not in seen:
                seen.add(index)
                # What a stage of this worker that went backward before shares with it has its gradient already.
                there = sum(size for a, b, size in costs.common if index in (a, b) and {a, b} <= seen)
                made = 0 if in_place else (stage.parameter_bytes - there) // parts
                rise = min(made, max(0, stage.gradient_rise_bytes // parts))
                moments.append(start + 0.5 * (end - start))
                changes.append((0, rise))
                moments.append(end)
                changes.append((-freed, made - rise))
            elif freed:
                moments.append(end)
                changes.append((-freed, 0))
            if ends and chunk == last_chunk and parts != divide:
                moments.append(end)
                changes.append((0, stage.parameter_bytes // divide - stage.parameter_bytes))
            if ends and chunk == last_chunk and bucketed and not in_place:
                moments.append(end)
                changes.append((0, -stage.parameter_bytes))
    ordered = sorted(range(len(moments)), key=lambda at: moments[at])
    activations = np.cumsum([changes[at][0] for at in ordered])
    return (
        np.array([moments[at] for at in ordered]),
        np.array([sum(changes[at]) for at in ordered], dtype=np.int64),
        int(activations.max(initial=0)),
        most,
    )


def held_microbatches(times: Times, stage: int) -> int:
    """The most micro-batches of a stage that are between their forward and the end of their backward."""
    own = times.stage == stage
    begun = times.end_s[own & (times.kind == FORWARD)]
    done = times.end_s[own & ((times.kind == BACKWARD) | (times.kind == BACKWARD_WEIGHT))]
    moments = np.concatenate([begun, done])
    changes = np.concatenate([np.ones(len(begun)), -np.ones(len(done))])
    order = np.lexsort((changes, moments))
    return int(np.cumsum(changes[order]).max(initial=0))
