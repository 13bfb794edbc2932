"""Name the rank or link that slows a job down, and why: worker, link, data loader, garbage collector, checkpoint.

Each candidate (the compute of one rank, its data loading, …, the transfers between two ranks) takes the typical time of
its peers in turn: the other ranks of its stage, or the other stages where a stage has one rank. The candidate without
which the step is fastest is the culprit, if it costs 3 % of the step or more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from stagewright.errors import UsageError
from stagewright.quantity import format_s
from stagewright.trace.stragglers.job import Job, Op, Simulator, Times

MIN_SHARE = 0.03
"""Share of the step from which a culprit is named."""
_PAUSED = 0.7  # of the lost time in a tenth of the operations: pauses rather than slow compute
_COMPUTE = ("forward", "backward", "optimizer", "host", "encode", "decode")
_FIXES = {
    "worker": "check its clock, temperature and other processes on its host",
    "pauses": "a few operations stall: garbage collection (gc.freeze(), or collect on all ranks at the same step), "
    "or another process on its host",
    "link": "check the network between the two hosts: stagewright fabric run",
    "data loader": "more DataLoader workers, or faster storage on its host",
    "garbage collector": "gc.freeze() after set-up, or collect on all ranks at the same step",
    "checkpoint": "save asynchronously, or from every rank its own shard",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """Who slows the job down."""

    cause: str
    """worker, pauses, link, data loader, garbage collector or checkpoint."""
    ranks: tuple[int, ...]
    """The rank, or both ranks of a link."""
    cost_s: float
    """Time of a step that disappears without it."""
    share: float
    """Of the step."""

    @property
    def sentence(self) -> str:
        who = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {self.ranks[0]} and {self.ranks[1]}"
        what = {"worker": "compute", "pauses": "pauses", "link": "transfers"}.get(self.cause, self.cause)
        cost = f"{format_s(self.cost_s)} ({self.share:.0%}) of each step"
        verb = "cost" if self.cause in ("pauses", "link") else "costs"
        return f"Slow: the {what} of {who} {verb} {cost}; {_FIXES[self.cause]}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ranks": list(self.ranks), "sentence": self.sentence}


@dataclass(frozen=True, slots=True)
class _Candidate:
    cause: str
    ranks: tuple[int, ...]
    cells: dict[Op, Times]  # 1 where the candidate's time is replaced


def find_culprit(job: Job) -> Culprit | None:
    """Return who costs most; None if no one costs 3 % of the step, or if the messages of the job can't be ordered."""
    try:
        simulator = Simulator.of(job)
    except UsageError:
        return None  # interleaved stages, whose messages between two ranks can't be told apart
    recorded = dict(job.durations)
    typical = peer_durations(job)
    step_s = float(simulator.step_times(recorded).mean())
    best: Culprit | None = None
    for candidate in _candidates(job):
        changed = dict(recorded)
        for op, mask in candidate.cells.items():
            changed[op] = np.where(mask > 0, np.minimum(typical[op], recorded[op]), recorded[op])
        cost_s = step_s - float(simulator.step_times(changed).mean())
        if cost_s >= MIN_SHARE * step_s and (best is None or cost_s > best.cost_s):
            cause = candidate.cause
            if cause == "worker" and _are_pauses(candidate, recorded, typical):
                cause = "pauses"
            best = Culprit(cause=cause, ranks=candidate.ranks, cost_s=cost_s, share=cost_s / step_s)
    return best


def peer_durations(job: Job) -> dict[Op, Times]:
    """Return what each operation takes on the peers of its rank: the median of the other replicas, or stages."""
    typical: dict[Op, Times] = {}
    for op, times in job.durations.items():
        if job.num_replicas > 1:
            rows = [
                np.median(np.delete(times, replica, axis=0)) if len(times) > 1 else np.median(times)
                for replica in range(len(times))
            ]
            typical[op] = np.broadcast_to(np.array(rows)[:, None], times.shape)
        else:
            others = [t for o, t in job.durations.items() if o.kind == op.kind and o.stage != op.stage]
            level = float(np.median(np.concatenate([t.ravel() for t in others]))) if others else float(np.median(times))
            typical[op] = np.full_like(times, level)
    return typical


def _candidates(job: Job) -> Iterator[_Candidate]:
    kinds = (
        ("worker", _COMPUTE),
        ("data loader", ("data-loading",)),
        ("garbage collector", ("garbage-collection",)),
        ("checkpoint", ("checkpoint",)),
    )
    shape = next(iter(job.durations.values())).shape
    for (replica, stage), rank in job.ranks.items():
        mask = np.zeros(shape)
        mask[replica] = 1.0
        for cause, names in kinds:
            cells = {op: mask for op in job.durations if op.stage == stage and op.kind in names}
            if cells:
                yield _Candidate(cause, (rank,), cells)
        peers = {job.links[op] for op in job.durations if op.stage == stage and op in job.links}
        for peer in sorted(other for other in peers if other > stage and (replica, other) in job.ranks):
            ends = {stage: peer, peer: stage}
            cells = {op: mask for op in job.durations if op in job.links and ends.get(op.stage) == job.links[op]}
            yield _Candidate("link", (rank, job.ranks[replica, peer]), cells)


def _are_pauses(candidate: _Candidate, recorded: dict[Op, Times], typical: dict[Op, Times]) -> bool:
    """Whether a tenth of the operations has most of the lost time."""
    lost = np.concatenate([(recorded[op] - typical[op])[mask > 0] for op, mask in candidate.cells.items()])
    lost = np.sort(np.maximum(lost, 0.0))[::-1]
    total = float(lost.sum())
    return total > 0 and float(lost[: max(1, len(lost) // 10)].sum()) >= _PAUSED * total
