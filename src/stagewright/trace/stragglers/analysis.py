"""The slow-down that stragglers cause, and which rank, stage, link or kind of operation causes it.

    S      step time as recorded / step time if every operation took the typical time of its kind
    S_w    the same with only rank w as recorded; likewise for a stage, a replica, a kind and a link
    M_W    share of the slow-down that disappears if the slowest 3 % of the ranks took typical times
    M_S    share that disappears if the last stage did

Typical is the mean of compute and the median of transfers. Gaps between operations are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from stagewright.trace.stragglers.job import Job, Op, Simulator, Times

_SLOWEST = 0.03  # share of the ranks that M_W replaces
_EXPLAINS = 0.5  # of the slow-down: share above which a cause is named
_CORRELATION = 0.9  # between forward and backward of the same micro-batch: their lengths differ
MIN_SLOWDOWN = 1.03
"""Below it nothing is blamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerAnalysis:
    """What stragglers cost, and who they are."""

    slowdown: float
    """S."""
    step_s: float
    """Mean step as recorded, without gaps between operations."""
    ideal_s: float
    """Mean step without stragglers."""
    by_rank: Mapping[int, float]
    """S_w of each rank."""
    by_stage: Mapping[int, float]
    by_replica: Mapping[int, float]
    by_kind: Mapping[str, float]
    worker_share: float
    """M_W."""
    last_stage_share: float
    """M_S."""
    length_correlation: float
    """Correlation of forward and backward times over micro-batches of a stage."""

    @property
    def slowest_rank(self) -> int:
        return max(self.by_rank, key=lambda rank: (self.by_rank[rank], -rank))

    @property
    def cause(self) -> str:
        """worker, last stage, sequence lengths, several or none."""
        if self.slowdown < MIN_SLOWDOWN:
            return "none"
        if self.worker_share >= _EXPLAINS:
            return "worker"
        if self.length_correlation >= _CORRELATION:
            return "sequence lengths"
        return "last stage" if self.last_stage_share >= _EXPLAINS else "several"

    @property
    def verdict(self) -> str:
        """The cause as a sentence."""
        cost = f"stragglers cost {1 - 1 / self.slowdown:.0%} of the step (S = {self.slowdown:.2f})"
        sentences = {
            "none": f"no straggler: the step is within {self.slowdown - 1:.1%} of the one with typical times",
            "worker": f"{cost}: rank {self.slowest_rank} causes {self.worker_share:.0%} of it; check its host",
            "last stage": f"{cost}: the last stage causes {self.last_stage_share:.0%} of it; give it fewer layers",
            "sequence lengths": f"{cost}: micro-batches differ in length (forward and backward correlate by "
            f"{self.length_correlation:.2f}); balance tokens over replicas and micro-batches",
            "several": f"{cost}; no single rank or stage causes half of it",
        }
        return sentences[self.cause]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "cause": self.cause, "verdict": self.verdict}


def analyze(job: Job) -> StragglerAnalysis:
    """Compare the recorded step with what-if steps."""
    simulator = Simulator.of(job)
    recorded, ideal = dict(job.durations), ideal_durations(job)
    recorded_s = float(simulator.step_times(recorded).mean())
    ideal_s = float(simulator.step_times(ideal).mean())

    def slowdown_of(keep: Callable[[Op], Times | bool]) -> float:
        return float(simulator.step_times(mix(ideal, recorded, keep)).mean()) / ideal_s

    def recovered(replace: Callable[[Op], Times | bool]) -> float:
        changed_s = float(simulator.step_times(mix(recorded, ideal, replace)).mean())
        return (recorded_s - changed_s) / (recorded_s - ideal_s) if recorded_s != ideal_s else 0.0

    by_replica = {replica: slowdown_of(_of_replica(job, replica)) for replica in range(job.num_replicas)}
    by_stage = {stage: slowdown_of(_of_stage(stage)) for stage in range(job.num_stages)}
    by_kind = {kind: slowdown_of(_of_kind(kind)) for kind in job.kinds}
    by_rank = {rank: min(by_replica[replica], by_stage[stage]) for (replica, stage), rank in job.ranks.items()}
    count = math.ceil(len(by_rank) * _SLOWEST)
    slowest = set(sorted(by_rank, key=lambda rank: (-by_rank[rank], rank))[:count])
    return StragglerAnalysis(
        slowdown=recorded_s / ideal_s,
        step_s=recorded_s,
        ideal_s=ideal_s,
        by_rank=by_rank,
        by_stage=by_stage,
        by_replica=by_replica,
        by_kind=by_kind,
        worker_share=recovered(of_ranks(job, slowest)),
        last_stage_share=recovered(_of_stage(job.num_stages - 1)),
        length_correlation=_length_correlation(job),
    )


def ideal_durations(job: Job) -> dict[Op, Times]:
    """Return the typical time of each operation's kind: the mean of compute, the median of communication."""
    typical = {}
    for kind in job.kinds:
        values = np.concatenate([times.ravel() for op, times in job.durations.items() if op.kind == kind])
        typical[kind] = float(np.median(values) if kind in job.communication else values.mean())
    return {op: np.full_like(times, typical[op.kind]) for op, times in job.durations.items()}


def mix(base: Mapping[Op, Times], other: Mapping[Op, Times], selected: Callable[[Op], Times | bool]) -> dict[Op, Times]:
    """Return the base with the selected operations, or cells of them, from the other."""
    mixed = {}
    for op, times in base.items():
        chosen = selected(op)
        if isinstance(chosen, bool):
            mixed[op] = other[op] if chosen else times
        else:
            mixed[op] = np.where(chosen > 0, other[op], times)
    return mixed


def of_ranks(job: Job, ranks: set[int]) -> Callable[[Op], Times | bool]:
    """Select the operations of some ranks."""
    masks: dict[int, Times] = {}
    shape = next(iter(job.durations.values())).shape
    for (replica, stage), rank in job.ranks.items():
        if rank in ranks:
            masks.setdefault(stage, np.zeros(shape))[replica] = 1.0
    return lambda op: masks.get(op.stage, False)


def _of_replica(job: Job, replica: int) -> Callable[[Op], Times | bool]:
    mask = np.zeros(next(iter(job.durations.values())).shape)
    mask[replica] = 1.0
    return lambda op: mask


def _of_stage(stage: int) -> Callable[[Op], Times | bool]:
    return lambda op: op.stage == stage


def _of_kind(kind: str) -> Callable[[Op], Times | bool]:
    return lambda op: op.kind == kind


def _length_correlation(job: Job) -> float:
    """Return the correlation of forward and backward times of the same micro-batch, relative to their stage's mean."""
    forward, backward = [], []
    for stage in range(job.num_stages):
        numbers = [op.number for op in job.durations if op.stage == stage and op.kind == "forward"]
        pairs = [
            (job.durations[Op(stage, "forward", n)], job.durations[Op(stage, "backward", n)])
            for n in numbers
            if Op(stage, "backward", n) in job.durations
        ]
        if pairs:
            first = np.concatenate([pair[0].ravel() for pair in pairs])
            second = np.concatenate([pair[1].ravel() for pair in pairs])
            forward.append(first / first.mean())
            backward.append(second / second.mean())
    if not forward:
        return 0.0
    x, y = np.concatenate(forward), np.concatenate(backward)
    if x.std() < 0.01 or y.std() < 0.01:  # all alike: nothing that could correlate
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])
