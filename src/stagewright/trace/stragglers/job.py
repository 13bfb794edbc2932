"""The operations of a job on a common grid, and its step time for any durations.

Every replica of every step executes the same operations, so an operation has one array of durations, replicas × steps:

    forward of stage 1, micro-batch 3    [[0.10, 0.11, 0.10],     replica 0, steps 0 to 2
                                          [0.10, 0.30, 0.10]]     replica 1

    start = last end of what it depends on
    end   = start + duration; of communication: last start in its group + transfer time

The method is that of "Understanding Stragglers in Large Model Training Using What-if Analysis" (Lin et al., OSDI 2025).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagewright.errors import UsageError

Times: TypeAlias = NDArray[np.float64]


class Op(NamedTuple):
    """An operation of every replica and step."""

    stage: int
    kind: str
    number: int
    """Among those of this kind on this stage, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The operations of a job, what they depend on, and how long each took."""

    durations: Mapping[Op, Times]
    """Replicas × steps; of communication the transfer time: from the last start in its group to its end."""
    depends: Mapping[Op, Sequence[Op]]
    """What an operation waits for on its own rank."""
    groups: Sequence[Sequence[Op]]
    """Operations of several stages that wait for each other: a send and its receive, a collective."""
    synced: frozenset[Op]
    """Collectives over all replicas."""
    communication: frozenset[str]
    """Kinds that are communication."""
    ranks: Mapping[tuple[int, int], int]
    """The rank of each replica and stage."""
    links: Mapping[Op, int] = field(default_factory=dict)
    """The stage at the other end of a send or receive."""
    contention: float = 0.0
    """Share of the steps in which ranks that share a host were ready to run and had no core; not in the durations."""

    @property
    def num_replicas(self) -> int:
        return int(next(iter(self.durations.values())).shape[0])

    @property
    def num_stages(self) -> int:
        return 1 + max(op.stage for op in self.durations)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(op.kind for op in self.durations))


@dataclass(frozen=True, slots=True)
class Simulator:
    """Computes step times of a job; the order of its operations is computed once."""

    job: Job
    order: tuple[tuple[Op, ...], ...]
    """Groups of operations that end together, each after what it depends on."""

    @classmethod
    def of(cls, job: Job) -> Simulator:
        groups = {op: tuple(group) for group in job.groups for op in group if op in job.durations}
        nodes = {op: tuple(o for o in groups.get(op, (op,)) if o in job.durations) for op in job.durations}
        waiting: dict[tuple[Op, ...], int] = {}
        after: dict[tuple[Op, ...], list[tuple[Op, ...]]] = {}
        for node in dict.fromkeys(nodes.values()):
            needed = {nodes[dep] for op in node for dep in job.depends.get(op, ()) if dep in nodes} - {node}
            waiting[node] = len(needed)
            for dep in needed:
                after.setdefault(dep, []).append(node)
        ready = deque(node for node, count in waiting.items() if count == 0)
        order: list[tuple[Op, ...]] = []
        while ready:
            node = ready.popleft()
            order.append(node)
            for following in after.get(node, ()):
                waiting[following] -= 1
                if waiting[following] == 0:
                    ready.append(following)
        if len(order) != len(waiting):
            raise UsageError(f"{len(waiting) - len(order)} operations wait for each other; are all files of one job?")
        return cls(job, tuple(order))

    def ends(self, durations: Mapping[Op, Times]) -> tuple[dict[Op, Times], dict[Op, Times]]:
        """Return start and end of every operation; a step starts at 0."""
        job = self.job
        starts: dict[Op, Times] = {}
        ends: dict[Op, Times] = {}
        zero = np.zeros_like(next(iter(durations.values())))
        for node in self.order:
            for op in node:
                start = zero
                for dep in job.depends.get(op, ()):
                    if dep in ends:
                        start = np.maximum(start, ends[dep])
                starts[op] = start
            common = starts[node[0]]
            for op in node[1:]:
                common = np.maximum(common, starts[op])
            if node[0] in job.synced:
                common = np.broadcast_to(common.max(axis=0), common.shape)
            for op in node:
                ends[op] = common + durations[op]
        return starts, ends

    def step_times(self, durations: Mapping[Op, Times]) -> Times:
        """Return the time of each step: the last end on any rank."""
        _, ends = self.ends(durations)
        last = next(iter(ends.values()))
        for end in ends.values():
            last = np.maximum(last, end)
        times: Times = last.max(axis=0)
        return times
