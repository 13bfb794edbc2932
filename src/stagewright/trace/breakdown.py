"""Where a worker's step went: six parts that add up to it.

    compute      forward, backward, recomputation, optimiser
    transfer     encoding, handing over and decoding messages, and waiting for one that was on its way
    collective   collectives that the worker waited for, from when the last of their workers had come
    bubble       waiting that the schedule makes, even with free links: found by running the step's own actions again,
                 each as long as it took, in the same order, with nothing between them
    wait         whatever else it waited for others: a peer that was late, more than the schedule makes
    overhead     the rest: the engine's own work between all that, reading a batch, zeroing gradients

Waiting for a message is *transfer* from the moment the peer began to send it; before that the peer was not ready.
Waiting until messages have left is *transfer* from the moment the peer wanted the last of them. What runs beside
computing (stream ``collective``) costs nothing here until the worker waits for it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from stagewright.errors import UsageError
from stagewright.trace.events import COMPUTE_KINDS, Trace, TraceEvent, WorkerTrace

__all__ = ["PARTS", "WorkerShare", "breakdown", "check_step", "message_of", "own_times", "schedule_idle"]

PARTS = ("compute", "transfer", "collective", "wait", "bubble", "overhead")
_TRANSFER = ("send", "encode", "decode")

Message: TypeAlias = tuple[int, int, str | None, int | None, int]
"""Sender, receiver, what it holds, micro-batch, edge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShare:
    """One worker's step, divided."""

    worker: int
    """Its world rank."""
    stages: tuple[int, ...]
    """Its stages."""
    step_s: float
    """The whole step on this worker: the six parts below, together."""
    compute_s: float
    transfer_s: float
    collective_s: float
    wait_s: float
    bubble_s: float
    overhead_s: float
    recompute_s: float
    """Of computing: running forward again, and the optimiser."""
    optimizer_s: float

    def parts(self) -> dict[str, float]:
        """The six parts by name, in order."""
        return {name: getattr(self, f"{name}_s") for name in PARTS}

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "stages": list(self.stages)}


def breakdown(trace: Trace, step: int) -> tuple[WorkerShare, ...]:
    """Every worker's step, divided; a worker that was killed in it is left out."""
    check_step(trace, step)
    events = {worker.rank: worker.of_step(step) for worker in trace.workers}
    sent, wanted = _send_times(events), _wanted_times(events)
    arrivals = _arrivals(trace, events)
    idle = schedule_idle(trace, step)
    return tuple(
        _share(worker, step, events[worker.rank], sent, wanted.get(worker.rank, -math.inf), arrivals, idle)
        for worker in trace.workers
        if worker.step(step) is not None
    )


def check_step(trace: Trace, step: int) -> None:
    """Refuse a step that was not recorded."""
    steps = trace.steps
    if step not in steps:
        known = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        raise UsageError(f"step {step} was not recorded; {trace.run} has {known}")


def _share(
    worker: WorkerTrace,
    step: int,
    events: Sequence[TraceEvent],
    sent: Mapping[Message, float],
    wanted_s: float,
    arrivals: Mapping[tuple[int, int], float],
    idle: Mapping[int, float],
) -> WorkerShare:
    whole = worker.step(step)
    assert whole is not None
    found = dict.fromkeys((*PARTS, "recompute", "optimizer", "waiting"), 0.0)
    number = 0
    for event, own_s in own_times([one for one in events if one.stream != "collective"]):
        if event.kind in COMPUTE_KINDS:
            found["compute"] += own_s
            if event.kind in found:
                found[event.kind] += own_s
        elif event.note in ("flush", "limit") and event.kind == "send":
            late_s = math.inf if event.note == "limit" else wanted_s
            waited_s = min(own_s, max(0.0, late_s - event.start_s))
            found["waiting"] += waited_s
            found["transfer"] += own_s - waited_s
        elif event.kind in _TRANSFER:
            found["transfer"] += own_s
        elif event.kind == "receive":
            # One without a peer was under way when the run failed: its message had not come.
            ready_s = math.inf if event.peer is None else sent.get(message_of(event, worker.rank), event.start_s)
            waited_s = min(own_s, max(0.0, ready_s - event.start_s))
            found["waiting"] += waited_s
            found["transfer"] += own_s - waited_s
        elif event.kind == "collective":
            ready_s = arrivals.get((worker.rank, number), event.start_s)
            number += 1
            waited_s = min(own_s, max(0.0, ready_s - event.start_s))
            found["waiting"] += waited_s
            found["collective"] += own_s - waited_s
    found["bubble"] = min(found["waiting"], idle.get(worker.rank, 0.0))
    found["wait"] = found["waiting"] - found["bubble"]
    found["overhead"] = whole.seconds - sum(found[name] for name in PARTS if name != "overhead")
    return WorkerShare(
        worker=worker.rank,
        stages=worker.stages,
        step_s=whole.seconds,
        **{f"{name}_s": found[name] for name in (*PARTS, "recompute", "optimizer")},
    )


def own_times(events: Sequence[TraceEvent]) -> Iterator[tuple[TraceEvent, float]]:
    """Each event with its time without what is nested in it, in the order of their begin."""
    own = [event.seconds for event in events]
    around: list[int] = []
    for at, event in enumerate(events):
        while around and events[around[-1]].end_s <= event.start_s:
            around.pop()
        if around:
            own[around[-1]] -= min(event.end_s, events[around[-1]].end_s) - event.start_s
        around.append(at)
    return zip(events, own, strict=True)


def message_of(event: TraceEvent, rank: int) -> Message:
    """What tells a message from all others of a step; the edge is the one after that stage."""
    assert event.peer is not None
    assert event.stage is not None
    receives = event.kind == "receive"
    ends = (event.peer, rank) if receives else (rank, event.peer)
    above = receives if event.note != "gradient" else not receives
    return (*ends, event.note, event.microbatch, event.stage - above)


def _send_times(events: Mapping[int, Sequence[TraceEvent]]) -> dict[Message, float]:
    """When the sender of each message began to hand it over."""
    found: dict[Message, float] = {}
    for rank, own in events.items():
        for event in own:
            if event.kind == "send" and event.peer is not None and event.stage is not None:
                found.setdefault(message_of(event, rank), event.start_s)
    return found


def _wanted_times(events: Mapping[int, Sequence[TraceEvent]]) -> dict[int, float]:
    """For each worker, when the last of its messages was wanted by whom it was for."""
    found: dict[int, float] = {}
    for own in events.values():
        for event in own:
            if event.kind == "receive" and event.peer is not None:
                found[event.peer] = max(found.get(event.peer, -math.inf), event.start_s)
    return found


def _arrivals(trace: Trace, events: Mapping[int, Sequence[TraceEvent]]) -> dict[tuple[int, int], float]:
    """For each worker and each collective that it waits for, by number, when the last of its workers had come to it.

    Workers of one axis call its collectives in the same order, so the n-th of one is the n-th of the others.
    """
    calls: dict[tuple[Any, ...], dict[int, list[tuple[int, float]]]] = {}
    for rank, own in events.items():
        waited = [one for one in own if one.kind == "collective" and one.stream != "collective"]
        for number, event in enumerate(waited):
            group = (event.note, *_group(trace, rank, event.note))
            calls.setdefault(group, {}).setdefault(rank, []).append((number, event.start_s))
    found: dict[tuple[int, int], float] = {}
    for (note, *_), ranks in calls.items():
        if note == "tied" or len({len(each) for each in ranks.values()}) != 1:
            continue  # held by some workers only, or not all were recorded
        for same in zip(*ranks.values(), strict=True):
            last_s = max(start_s for _, start_s in same)
            for rank, (number, _) in zip(ranks, same, strict=True):
                found[rank, number] = last_s
    return found


def _group(trace: Trace, rank: int, note: str | None) -> tuple[int, ...]:
    """Where the group of a collective lies in the mesh."""
    data, tensor, pipeline = trace.mesh.coordinates(rank)
    return {"data": (tensor, pipeline), "tensor": (data, pipeline), "tied": (data, tensor)}.get(note or "", ())


_Node: TypeAlias = tuple[str, int, int]
"""A direction, a stage and a micro-batch."""


def schedule_idle(trace: Trace, step: int) -> dict[int, float]:
    """For each worker of a pipeline, how long it would wait if links were free and nothing lay between its actions."""
    orders: dict[int, list[tuple[_Node | None, float]]] = {}
    for worker in trace.workers:
        mine = worker.of_step(step)
        compute = [one for one in mine if one.stream == "compute"]
        own = {id(event): seconds for event, seconds in own_times(compute)}
        inner = _recomputed(compute)
        orders[worker.rank] = [
            (_node(one), own[id(one)] + inner.get(id(one), 0.0))
            for one in compute
            if one.kind in COMPUTE_KINDS and one.kind != "recompute"
        ]
    found: dict[int, float] = {}
    for ranks in _pipelines(trace, step):
        ends = _finish({rank: orders[rank] for rank in ranks})
        if ends is None or len(ranks) == 1:
            continue
        for rank in ranks:
            found[rank] = max(0.0, max(ends.values()) - sum(seconds for _, seconds in orders[rank]))
    return found


def _recomputed(compute: Sequence[TraceEvent]) -> dict[int, float]:
    """Recomputation inside each backward."""
    found: dict[int, float] = {}
    outer = [one for one in compute if one.kind.startswith("backward")]
    starts = [one.start_s for one in outer]
    for event, seconds in own_times(compute):
        at = bisect.bisect_right(starts, event.start_s) - 1
        if event.kind == "recompute" and at >= 0:
            found[id(outer[at])] = found.get(id(outer[at]), 0.0) + seconds
    return found


def _node(event: TraceEvent) -> _Node | None:
    """The action that others may wait for; None: the optimiser and the second half of a backward."""
    if event.kind == "forward" and event.stage is not None and event.microbatch is not None:
        return "forward", event.stage, event.microbatch
    if event.kind in ("backward", "backward-input") and event.stage is not None and event.microbatch is not None:
        return "backward", event.stage, event.microbatch
    return None


def _pipelines(trace: Trace, step: int) -> list[list[int]]:
    """Ranks that send messages to each other, directly or not."""
    home = {worker.rank: worker.rank for worker in trace.workers}

    def root(rank: int) -> int:
        while home[rank] != rank:
            rank = home[rank]
        return rank

    for worker in trace.workers:
        for event in worker.of_step(step):
            if event.peer is not None and event.peer in home:
                home[root(event.peer)] = root(worker.rank)
    groups: dict[int, list[int]] = {}
    for rank in home:
        groups.setdefault(root(rank), []).append(rank)
    return list(groups.values())


def _finish(orders: Mapping[int, Sequence[tuple[_Node | None, float]]]) -> dict[int, float] | None:
    """When each worker is done with its actions, each begun when the worker and its input are there; None: never."""
    last = max((node[1] for order in orders.values() for node, _ in order if node is not None), default=0)
    done: dict[_Node, float] = {}
    ends, places = dict.fromkeys(orders, 0.0), dict.fromkeys(orders, 0)
    total = {node for order in orders.values() for node, _ in order if node is not None}
    moved = True
    while moved:
        moved = False
        for rank, order in orders.items():
            while places[rank] < len(order):
                node, seconds = order[places[rank]]
                needed = _before(node, last)
                if needed is not None and needed not in done and needed in total:
                    break
                ready_s = done.get(needed, 0.0) if needed is not None else 0.0
                ends[rank] = max(ends[rank], ready_s) + seconds
                if node is not None:
                    done[node] = ends[rank]
                places[rank] += 1
                moved = True
    return ends if all(places[rank] == len(order) for rank, order in orders.items()) else None


def _before(node: _Node | None, last: int) -> _Node | None:
    """The action of a neighbour stage whose result an action takes."""
    if node is None:
        return None
    way, stage, microbatch = node
    if way == "forward":
        return ("forward", stage - 1, microbatch) if stage > 0 else None
    return ("backward", stage + 1, microbatch) if stage < last else None
