"""Name the rank or link that slows a job down, and why: worker, link, data loader, garbage collector, checkpoint.

Each candidate (the compute of one rank, its data loading, …, the transfers between two ranks) takes the times of its
peers in turn: of the other ranks of its stage, or of the other stages where a stage has one rank. The candidate without
which the step is fastest is the culprit, if it costs 3 % of the step or more (10 % on hosts with too few cores), and if
chance does not explain it:

    own times, sorted      12  13  15  40      its slowest step takes the time of the peers' slowest steps, and so on:
    times of its peers     10  11  12  14      variation that all have costs nothing
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from stagewright.errors import UsageError
from stagewright.quantity import format_s
from stagewright.trace.stragglers.job import Job, Op, Simulator, Times

MIN_SHARE = 0.03
"""Share of the step from which a culprit is named."""
MIN_SHARE_CONTENDED = 0.1
"""The same where ranks of one host waited for its cores for more than `MIN_SHARE` of the step.

Such ranks also share caches, memory bandwidth and interrupts. Which of them suffers is chance, and may last a while.
"""
_CERTAIN = 4.0  # standard errors by which a culprit is slower than its peers
_CERTAIN_FEW = 7.0  # the same with fewer than _FEW_STEPS steps, whose standard error is itself uncertain
_FEW_STEPS = 8
_STALL = 8.0  # times the worst delay of any peer: a single stall that is no chance
_STALL_STEPS = 3.0  # and times the step
_STAGE = 1.3  # times the compute of other stages, where a stage has one rank: stages differ by themselves
_SELDOM = ("garbage collector", "checkpoint")  # recorded as such, and in few steps
_ABSENT = ("garbage-collection", "checkpoint")  # kinds that take 0 s on stages without them
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
    """Of the step, without the time in which ranks that share a host waited for its cores."""

    @property
    def sentence(self) -> str:
        who = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {self.ranks[0]} and {self.ranks[1]}"
        what = {"worker": "compute", "pauses": "pauses", "link": "transfers"}.get(self.cause, self.cause)
        cost = f"{format_s(self.cost_s)} ({self.share:.0%}) of each step"
        verb = "cost" if self.cause in ("pauses", "link") else "costs"
        return f"Slow: the {what} of {who} {verb} {cost}; {_FIXES[self.cause]}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ranks": list(self.ranks), "sentence": self.sentence}


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    cause: str
    ranks: tuple[int, ...]
    cells: dict[Op, Times]
    """1 where the candidate's time is replaced."""


def find_culprit(job: Job) -> Culprit | None:
    """Return who costs most; None if no one costs enough, or if the messages of the job can't be ordered."""
    try:
        simulator = Simulator.of(job)
    except UsageError:
        return None  # interleaved stages, whose messages between two ranks can't be told apart
    typical = peer_durations(job)
    steps_s = simulator.step_times(job.durations)
    step_s, usual_s = float(steps_s.mean()), float(np.median(steps_s))
    candidates = list(_candidates(job))

    def cost_s(candidate: _Candidate) -> float:
        changed = dict(job.durations)
        for op, mask in candidate.cells.items():
            times = job.durations[op]
            changed[op] = np.where(mask > 0, np.minimum(typical[op], times), times)
        return step_s - float(simulator.step_times(changed).mean())

    costs = [(cost_s(candidate), candidate) for candidate in candidates]
    costly = [(cost, candidate) for cost, candidate in costs if cost >= _min_share(candidate, job) * step_s]
    certain = [(cost, other) for cost, other in costly if _is_certain(other, candidates, job, usual_s)]
    if not certain:
        return None
    cost, best = max(certain, key=itemgetter(0))
    chance_s = max(
        (c for c, other in costly if (c, other) not in certain and not {*other.ranks} & {*best.ranks}), default=0.0
    )
    if chance_s > cost:
        return None  # what chance costs elsewhere is more
    if best.cause == "link":  # a rank that is stopped or starved also handles its messages late, but not the reverse
        ends = [(c, other) for c, other in certain if other.cause == "worker" and other.ranks[0] in best.ranks]
        if ends:
            _, worker = max(ends, key=itemgetter(0))
            cost = cost_s(_Candidate("worker", worker.ranks, {**best.cells, **worker.cells}))
            best = worker
    cause = "pauses" if best.cause == "worker" and _are_pauses(best, job.durations, typical) else best.cause
    return Culprit(cause=cause, ranks=best.ranks, cost_s=cost, share=cost / step_s)


def _min_share(candidate: _Candidate, job: Job) -> float:
    """Return the share of the step from which a candidate counts; what is recorded as such is compared with nobody."""
    is_exact = job.contention < MIN_SHARE or candidate.cause in _SELDOM
    return MIN_SHARE if is_exact else MIN_SHARE_CONTENDED


def peer_durations(job: Job) -> dict[Op, Times]:
    """Return what each operation takes on the peers of its rank, quantile by quantile of its own times."""
    typical: dict[Op, Times] = {}
    for op, times in job.durations.items():
        if job.num_replicas > 1:
            rows = [_as_peers(row, np.delete(times, replica, axis=0)) for replica, row in enumerate(times)]
            typical[op] = np.stack(rows)
        else:
            others = [t.ravel() for o, t in job.durations.items() if o.kind == op.kind and o.stage != op.stage]
            if not others and op.kind in _ABSENT:
                others = [np.zeros(1)]
            typical[op] = np.stack([_as_peers(times[0], np.concatenate(others))]) if others else times
    return typical


def _as_peers(own: Times, peers: Times) -> Times:
    """Return the peers' time at the quantile of each own one."""
    quantiles = (np.argsort(np.argsort(own)) + 0.5) / len(own)
    values: Times = np.quantile(peers, quantiles)
    return values


def _is_certain(candidate: _Candidate, candidates: Sequence[_Candidate], job: Job, step_s: float) -> bool:
    """Whether a candidate is slower than its peers in nearly every step, on average, or once by far.

    Slower means by several standard errors of the median or mean. One step alone is believed. What is recorded as such,
    like garbage collection, is believed from the second step on.
    """
    own_s = _total_s(candidate, job)
    if candidate.cause in _SELDOM:
        return bool((own_s > 0).sum() >= min(2, len(own_s)))
    stages = {op.stage for op in candidate.cells}
    peers = [
        _total_s(other, job)
        for other in candidates
        if other is not candidate
        and other.cause == candidate.cause
        and (job.num_replicas == 1 or {op.stage for op in other.cells} == stages)
    ]
    is_stage = job.num_replicas == 1 and candidate.cause == "worker" and bool(peers)
    if is_stage and float(np.median(own_s)) < _STAGE * float(np.median(peers)):
        return False
    if len(own_s) < 2 or not peers:
        return True
    later_s = own_s - np.median(peers, axis=0)
    needed = (_CERTAIN if len(own_s) >= _FEW_STEPS else _CERTAIN_FEW) / len(own_s) ** 0.5
    usual_s = float(np.median(later_s))
    spread_s = 1.4826 * 1.2533 * float(np.median(np.abs(later_s - usual_s)))  # of a normal distribution's median
    if usual_s > 0 and usual_s >= needed * spread_s:
        return True
    if float(later_s.mean()) >= needed * float(later_s.std(ddof=1)):
        return True
    worst_s = max(float((peer_s - np.median(peer_s)).max()) for peer_s in peers)
    return float((own_s - np.median(own_s)).max()) >= max(_STALL * worst_s, _STALL_STEPS * step_s)


def _total_s(candidate: _Candidate, job: Job) -> Times:
    """Return the time of a candidate in each step."""
    total: Times = np.sum([(job.durations[op] * mask).sum(axis=0) for op, mask in candidate.cells.items()], axis=0)
    return total


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


def _are_pauses(candidate: _Candidate, recorded: Mapping[Op, Times], typical: Mapping[Op, Times]) -> bool:
    """Whether a tenth of the operations has most of the lost time."""
    lost = np.concatenate([(recorded[op] - typical[op])[mask > 0] for op, mask in candidate.cells.items()])
    lost = np.sort(np.maximum(lost, 0.0))[::-1]
    total = float(lost.sum())
    return total > 0 and float(lost[: max(1, len(lost) // 10)].sum()) >= _PAUSED * total
