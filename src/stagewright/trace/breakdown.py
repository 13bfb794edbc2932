"""The breakdown of a worker's step into six parts that add up to it.

    compute      forward, backward, recomputation, optimizer
    transfer     encoding, sending and decoding, and waiting for a tensor in flight
    collective   exposed collectives, from the arrival of the last worker
    bubble       pipeline bubble: waiting that the schedule causes even with free links, found by simulating the step's
                 actions with their measured times, in the same order, without gaps
    wait         other waiting for a late peer, beyond the bubble
    overhead     the rest: engine overhead, reading a batch, zeroing gradients; for jobs of others also data loading,
                 checkpointing, garbage collection, copies between host and device, kernel launch, idle

Waiting for a receive is *transfer* from the moment the peer began to send; before that the peer was not ready. Waiting
until sends have completed is *transfer* from the moment the peer posted the last receive. Overlapped communication
(stream ``collective``) costs nothing here until the worker waits for it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from stagewright.errors import UsageError
from stagewright.trace.events import COMPUTE_KINDS, HOST_KINDS, Trace, TraceEvent, WorkerTrace

PARTS = ("compute", "transfer", "collective", "wait", "bubble", "overhead")
_TRANSFER = ("send", "receive", "encode", "decode")

Message: TypeAlias = tuple[int, int, str | None, int | None, int]
"""Sender, receiver, content, micro-batch, edge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShare:
    """The breakdown of one worker's step."""

    worker: int
    stages: tuple[int, ...]
    step_s: float
    """Sum of the six parts below."""
    compute_s: float
    transfer_s: float
    collective_s: float
    wait_s: float
    bubble_s: float
    overhead_s: float
    recompute_s: float
    """Part of compute."""
    optimizer_s: float
    details: tuple[tuple[str, str, float], ...] = ()
    """Parts of collective and overhead: (part, name, seconds), such as ("collective", "all-reduce, data", 0.01)."""

    def parts(self) -> dict[str, float]:
        """Return the six parts by name."""
        return {name: getattr(self, f"{name}_s") for name in PARTS}

    def to_dict(self) -> dict[str, Any]:
        values = {**asdict(self), "stages": list(self.stages)}
        details = values.pop("details")
        named = [dict(zip(("part", "name", "seconds"), detail, strict=True)) for detail in details]
        return values | ({"details": named} if named else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockingEvent:
    """An event that blocks its worker, and how long of it the worker waited for others."""

    event: TraceEvent
    own_s: float
    """Self time: without nested events."""
    waited_s: float
    """Time at its beginning in which a peer was not ready: wait or bubble, neither transfer nor collective."""


def breakdown(trace: Trace, step: int) -> tuple[WorkerShare, ...]:
    """Break down a step for every worker; workers that were killed in it are omitted."""
    events = blocking_events(trace, step)
    idle = schedule_idle(trace, step)
    return tuple(
        _share(worker, whole, events[worker.rank], idle.get(worker.rank, 0.0))
        for worker in trace.workers
        if (whole := worker.step(step)) is not None
    )


def mean_parts(shares: Sequence[WorkerShare], num_batches: int = 1) -> dict[str, float]:
    """Return the mean of each part over the workers, per batch of a step that streams several."""
    return {name: sum(share.parts()[name] for share in shares) / (len(shares) * num_batches) for name in PARTS}


def blocking_events(trace: Trace, step: int) -> dict[int, tuple[BlockingEvent, ...]]:
    """Return each worker's blocking events in a step with their waits: what tables, charts and timelines show."""
    check_step(trace, step)
    events = {worker.rank: worker.of_step(step) for worker in trace.workers}
    sent, last_receive = _send_times(events), _last_receive_times(events)
    arrivals = _arrivals(trace, events)
    blocking: dict[int, tuple[BlockingEvent, ...]] = {}
    for rank, worker_events in events.items():
        blocked, number = [], 0
        for event, own_s in self_times([event for event in worker_events if event.stream != "collective"]):
            ready_s = event.start_s
            if event.kind == "send" and event.note in ("flush", "limit"):
                ready_s = math.inf if event.note == "limit" else last_receive.get(rank, -math.inf)
            elif event.kind == "receive":
                # Without a peer, the receive was interrupted by a failure.
                ready_s = math.inf if event.peer is None else sent.get(message_of(event, rank), event.start_s)
            elif event.kind == "collective":
                ready_s = arrivals.get((rank, number), event.start_s)
                number += 1
            waited_s = min(own_s, max(0.0, ready_s - event.start_s))
            blocked.append(BlockingEvent(event=event, own_s=own_s, waited_s=waited_s))
        blocking[rank] = tuple(blocked)
    return blocking


def check_step(trace: Trace, step: int) -> None:
    """Refuse a step that was not recorded."""
    steps = trace.steps
    if step not in steps:
        known = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        raise UsageError(f"step {step} was not recorded; {trace.run} has {known}")


def _share(worker: WorkerTrace, whole: TraceEvent, events: Sequence[BlockingEvent], idle_s: float) -> WorkerShare:
    parts = dict.fromkeys((*PARTS, "recompute", "optimizer", "waiting"), 0.0)
    details: dict[tuple[str, str], float] = {}
    for blocking in events:
        kind, own_s = blocking.event.kind, blocking.own_s - blocking.waited_s
        parts["waiting"] += blocking.waited_s
        if kind in COMPUTE_KINDS:
            parts["compute"] += own_s
            if kind in parts:
                parts[kind] += own_s
        elif kind in _TRANSFER:
            parts["transfer"] += own_s
        elif kind == "collective":
            parts["collective"] += own_s
            key = ("collective", blocking.event.note or "collective")
            details[key] = details.get(key, 0.0) + own_s
        elif kind in HOST_KINDS:
            details["overhead", kind] = details.get(("overhead", kind), 0.0) + own_s
    parts["bubble"] = min(parts["waiting"], idle_s)
    parts["wait"] = parts["waiting"] - parts["bubble"]
    parts["overhead"] = whole.seconds - sum(parts[name] for name in PARTS if name != "overhead")
    return WorkerShare(
        worker=worker.rank,
        stages=worker.stages,
        step_s=whole.seconds,
        **{f"{name}_s": parts[name] for name in (*PARTS, "recompute", "optimizer")},
        details=tuple((part, name, seconds) for (part, name), seconds in details.items()),
    )


def self_times(events: Sequence[TraceEvent]) -> Iterator[tuple[TraceEvent, float]]:
    """Return each event with its self time (without nested events), by start time."""
    times = [event.seconds for event in events]
    around: list[int] = []
    for index, event in enumerate(events):
        while around and events[around[-1]].end_s <= event.start_s:
            around.pop()
        if around:
            times[around[-1]] -= min(event.end_s, events[around[-1]].end_s) - event.start_s
        around.append(index)
    return zip(events, times, strict=True)


def message_of(event: TraceEvent, rank: int) -> Message:
    """Return the identity of a P2P tensor in a step; an edge is named by the stage before it."""
    assert event.peer is not None
    assert event.stage is not None
    receives = event.kind == "receive"
    ends = (event.peer, rank) if receives else (rank, event.peer)
    above = receives if event.note != "gradient" else not receives
    return (*ends, event.note, event.microbatch, event.stage - above)


def _send_times(events: Mapping[int, Sequence[TraceEvent]]) -> dict[Message, float]:
    """Return when the sender of each tensor began to send it."""
    times: dict[Message, float] = {}
    for rank, worker_events in events.items():
        for event in worker_events:
            if event.kind == "send" and event.peer is not None and event.stage is not None:
                times.setdefault(message_of(event, rank), event.start_s)
    return times


def _last_receive_times(events: Mapping[int, Sequence[TraceEvent]]) -> dict[int, float]:
    """Return for each worker when its peers posted the last receive from it."""
    times: dict[int, float] = {}
    for worker_events in events.values():
        for event in worker_events:
            if event.kind == "receive" and event.peer is not None:
                times[event.peer] = max(times.get(event.peer, -math.inf), event.start_s)
    return times


def _arrivals(trace: Trace, events: Mapping[int, Sequence[TraceEvent]]) -> dict[tuple[int, int], float]:
    """Return for each worker and exposed collective, by number, when the last worker arrived.

    Workers of one axis call its collectives in the same order, unless each call has an identity.
    """
    joined: dict[str, float] = {}
    for worker_events in events.values():
        begun: dict[str, float] = {}
        for event in worker_events:
            if event.call is not None:
                begun[event.call] = min(begun.get(event.call, math.inf), event.start_s)
        for name, start_s in begun.items():
            joined[name] = max(joined.get(name, -math.inf), start_s)
    arrivals: dict[tuple[int, int], float] = {}
    calls: dict[tuple[Any, ...], dict[int, list[tuple[int, float]]]] = {}
    for rank, worker_events in events.items():
        waited = [event for event in worker_events if event.kind == "collective" and event.stream != "collective"]
        for number, event in enumerate(waited):
            if event.call is not None:
                arrivals[rank, number] = joined[event.call]
                continue
            group = (event.note, *_group(trace, rank, event.note))
            calls.setdefault(group, {}).setdefault(rank, []).append((number, event.start_s))
    for (note, *_), ranks in calls.items():
        if note == "tied" or len({len(calls_of_rank) for calls_of_rank in ranks.values()}) != 1:
            continue  # only some workers take part, or not all were recorded
        for call in zip(*ranks.values(), strict=True):
            last_s = max(start_s for _, start_s in call)
            for rank, (number, _) in zip(ranks, call, strict=True):
                arrivals[rank, number] = last_s
    return arrivals


def _group(trace: Trace, rank: int, note: str | None) -> tuple[int, ...]:
    """Return the mesh coordinates of a collective's group."""
    data, tensor, pipeline = trace.mesh.coordinates(rank)
    degrees = trace.mesh.degrees
    groups = {
        "data": (tensor, pipeline),
        "tensor": (data, pipeline),
        "context": (data, pipeline),
        "expert": (data // trace.mesh.expert, tensor, pipeline),
        "tied": (data, tensor) if degrees[0] == degrees[-1] else (data,),
    }
    return groups.get(note or "", ())


_Node: TypeAlias = tuple[str, int, int]
"""A direction, a stage and a micro-batch."""


def schedule_idle(trace: Trace, step: int) -> dict[int, float]:
    """Return for each worker of a pipeline how long it would wait with free links and without gaps."""
    orders: dict[int, list[tuple[_Node | None, float]]] = {}
    for worker in trace.workers:
        compute = [event for event in worker.of_step(step) if event.stream == "compute"]
        times = {id(event): seconds for event, seconds in self_times(compute)}
        recompute = _recompute_times(compute)
        orders[worker.rank] = [
            (_node(event), times[id(event)] + recompute.get(id(event), 0.0))
            for event in compute
            if event.kind in COMPUTE_KINDS and event.kind != "recompute"
        ]
    idle: dict[int, float] = {}
    for ranks in _pipelines(trace, step):
        ends = _simulate({rank: orders[rank] for rank in ranks})
        if ends is None or len(ranks) == 1:
            continue
        for rank in ranks:
            idle[rank] = max(0.0, max(ends.values()) - sum(seconds for _, seconds in orders[rank]))
    return idle


def _recompute_times(compute: Sequence[TraceEvent]) -> dict[int, float]:
    """Return the recomputation time inside each backward."""
    times: dict[int, float] = {}
    outer = [event for event in compute if event.kind.startswith("backward")]
    starts = [event.start_s for event in outer]
    for event, seconds in self_times(compute):
        index = bisect.bisect_right(starts, event.start_s) - 1
        if event.kind == "recompute" and index >= 0:
            times[id(outer[index])] = times.get(id(outer[index]), 0.0) + seconds
    return times


def _node(event: TraceEvent) -> _Node | None:
    """Return the action that others may wait for; None for the optimizer and weight gradients."""
    if event.kind == "forward" and event.stage is not None and event.microbatch is not None:
        return "forward", event.stage, event.microbatch
    if event.kind in ("backward", "backward-input") and event.stage is not None and event.microbatch is not None:
        return "backward", event.stage, event.microbatch
    return None


def _pipelines(trace: Trace, step: int) -> list[list[int]]:
    """Group the ranks that are connected by sends and receives."""
    parent = {worker.rank: worker.rank for worker in trace.workers}

    def root(rank: int) -> int:
        while parent[rank] != rank:
            rank = parent[rank]
        return rank

    for worker in trace.workers:
        for event in worker.of_step(step):
            if event.peer is not None and event.peer in parent:
                parent[root(event.peer)] = root(worker.rank)
    groups: dict[int, list[int]] = {}
    for rank in parent:
        groups.setdefault(root(rank), []).append(rank)
    return list(groups.values())


def _simulate(orders: Mapping[int, Sequence[tuple[_Node | None, float]]]) -> dict[int, float] | None:
    """Return when each worker finishes its actions with free links; None for a deadlock."""
    last = max((node[1] for order in orders.values() for node, _ in order if node is not None), default=0)
    done: dict[_Node, float] = {}
    ends, positions = dict.fromkeys(orders, 0.0), dict.fromkeys(orders, 0)
    total = {node for order in orders.values() for node, _ in order if node is not None}
    progressed = True
    while progressed:
        progressed = False
        for rank, order in orders.items():
            while positions[rank] < len(order):
                node, seconds = order[positions[rank]]
                needed = _dependency(node, last)
                if needed is not None and needed not in done and needed in total:
                    break
                ready_s = done.get(needed, 0.0) if needed is not None else 0.0
                ends[rank] = max(ends[rank], ready_s) + seconds
                if node is not None:
                    done[node] = ends[rank]
                positions[rank] += 1
                progressed = True
    return ends if all(positions[rank] == len(order) for rank, order in orders.items()) else None


def _dependency(node: _Node | None, last: int) -> _Node | None:
    """Return the action of a neighboring stage that an action depends on."""
    if node is None:
        return None
    direction, stage, microbatch = node
    if direction == "forward":
        return ("forward", stage - 1, microbatch) if stage > 0 else None
    return ("backward", stage + 1, microbatch) if stage < last else None
