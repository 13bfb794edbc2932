"""A recorded trace as a job of operations: what each rank did itself, without waiting for others.

    data loading → garbage collection → host → (receive → forward → send) … → collectives → optimizer

Ranks of one stage are replicas of each other. Per step and rank, the times of one kind (of one micro-batch in a
pipeline) are one operation; what a rank did not do took 0 s. A transfer counts from the moment both sides were ready.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stagewright.trace.breakdown import BlockingEvent, blocking_events
from stagewright.trace.events import COMPUTE_KINDS, HOST_KINDS, StepScheduling, Trace
from stagewright.trace.stragglers.job import Job, Op, Times

_SEPARATE = ("data-loading", "garbage-collection", "checkpoint")
_FIRST = (*_SEPARATE, "host")


def job_of_trace(trace: Trace) -> Job:
    """Return the operations of all steps that every worker completed."""
    steps = [step for step in trace.steps if step != trace.unfinished_step]
    positions = _replicas_and_stages(trace)
    num_replicas = 1 + max(replica for replica, _ in positions.values())
    shape = (num_replicas, len(steps))
    durations: dict[Op, Times] = {}
    begins: dict[Op, float] = {}
    hosts = [worker.host for worker in trace.workers]
    shared = {host for host in hosts if hosts.count(host) > 1}
    starved_s = total_s = 0.0
    for column, step in enumerate(steps):
        blocking = blocking_events(trace, step)
        for worker in trace.workers:
            replica, stage = positions[worker.rank]
            whole = worker.step(step)
            assert whole is not None
            times: dict[Op, float] = {}
            for blocked in blocking[worker.rank]:
                op = _op(blocked, stage)
                times[op] = times.get(op, 0.0) + blocked.own_s - blocked.waited_s
                begins.setdefault(op, blocked.event.start_s - whole.start_s)
            waited_s = sum(blocked.waited_s for blocked in blocking[worker.rank])
            host = Op(stage, "host", 0)
            unrecorded_s = max(0.0, whole.seconds - waited_s - sum(times.values()))
            times[host] = times.get(host, 0.0) + unrecorded_s
            scheduling = worker.scheduling.get(step)
            total_s += whole.seconds
            if worker.host in shared and scheduling is not None:
                starved_s += scheduling.runqueue_s
                _subtract_run_queue(times, scheduling)
            for op, seconds in times.items():
                durations.setdefault(op, np.zeros(shape))[replica, column] = seconds
    groups = [
        (op, received)
        for op in durations
        if op.kind.startswith("send ") and (received := _received(op, durations)) is not None
    ]
    collectives = frozenset(op for op in durations if op.kind.startswith("collective "))
    messages = {op.kind for op in durations if op.kind.startswith(("send ", "receive "))}
    return Job(
        durations=durations,
        depends=_depends(durations, begins),
        groups=groups,
        synced=collectives if num_replicas > 1 else frozenset(),
        communication=frozenset({op.kind for op in collectives} | messages),
        ranks={position: rank for rank, position in positions.items()},
        links={op: peer for op in durations if (peer := _other_stage(op)) is not None},
        contention=starved_s / total_s if total_s > 0 else 0.0,
    )


def _subtract_run_queue(times: dict[Op, float], scheduling: StepScheduling) -> None:
    """Subtract the time that a rank was ready to compute and had no core, of a host that it shares with other ranks.

    Which of them the scheduler lets wait is no rank's fault. Ranks also wait for a core after a message has arrived, so
    at least the time on a core remains.
    """
    for op in times:
        if op.kind == "data-loading":
            times[op] = max(0.0, times[op] - scheduling.loading_runqueue_s)
    own = [op for op in times if op.kind in COMPUTE_KINDS or op.kind == "host"]
    total_s = sum(times[op] for op in own)
    if total_s > 0:
        least_s = min(total_s, scheduling.cpu_s)
        starved_s = max(0.0, scheduling.runqueue_s - scheduling.loading_runqueue_s)
        factor = max(least_s, total_s - starved_s) / total_s
        for op in own:
            times[op] *= factor


def _replicas_and_stages(trace: Trace) -> dict[int, tuple[int, int]]:
    """Return the replica and the stage of each rank."""
    positions: dict[int, tuple[int, int]] = {}
    counts: dict[int, int] = {}
    for worker in trace.workers:
        stage = worker.stages[0] if trace.mesh.pipeline > 1 and worker.stages else 0
        positions[worker.rank] = (counts.get(stage, 0), stage)
        counts[stage] = counts.get(stage, 0) + 1
    return positions


def _op(blocked: BlockingEvent, stage: int) -> Op:
    event = blocked.event
    if event.kind in _SEPARATE:
        return Op(stage, event.kind, 0)
    if event.kind in HOST_KINDS:
        return Op(stage, "host", 0)
    if event.kind in ("send", "receive"):
        return Op(stage, f"{event.kind} {event.note or 'message'}", event.microbatch or 0)
    if event.kind == "collective":
        return Op(stage, f"collective {event.note or 'any'}", 0)
    if event.kind in ("encode", "decode"):
        return Op(stage, event.kind, event.microbatch or 0)
    kind = "backward" if event.kind.startswith("backward") or event.kind == "recompute" else event.kind
    return Op(stage, kind, 0 if kind == "optimizer" else event.microbatch or 0)


def _received(op: Op, durations: Mapping[Op, Times]) -> Op | None:
    """Return the receive of a send at the neighboring stage."""
    peer = _other_stage(op)
    received = None if peer is None else Op(peer, op.kind.replace("send ", "receive "), op.number)
    return received if received in durations else None


def _other_stage(op: Op) -> int | None:
    if not op.kind.startswith(("send ", "receive ")):
        return None
    onward = op.kind.startswith("send ") != op.kind.endswith("gradient")
    return op.stage + 1 if onward else op.stage - 1


def _depends(durations: Mapping[Op, Times], begins: Mapping[Op, float]) -> dict[Op, list[Op]]:
    depends: dict[Op, list[Op]] = {op: [] for op in durations}
    for stage in {op.stage for op in durations}:
        own = [op for op in durations if op.stage == stage]

        def place(op: Op) -> tuple[int, float]:
            if op.kind in _FIRST:
                return 0, float(_FIRST.index(op.kind))
            if op.kind.startswith("collective "):
                return 2, begins[op]
            return (3 if op.kind == "optimizer" else 1), begins[op]

        before: Op | None = None
        for op in sorted((op for op in own if not op.kind.startswith(("send ", "receive "))), key=place):
            if before is not None:
                depends[op].append(before)
            before = op
        for op in own:
            content = "gradient" if op.kind.endswith("gradient") else "activation"
            action = Op(stage, "backward" if content == "gradient" else "forward", op.number)
            if action not in depends:
                continue
            if op.kind.startswith("receive "):
                depends[action].append(op)
            elif op.kind.startswith("send "):
                depends[op].append(action)
    return depends
