"""What is sent: the messages of one training step, how often, how they follow each other, who is late.

    one trial, serial        barrier ─ gap ─ message 0 ─ barrier ─ gap ─ message 1 ─ …
    one trial, overlapped    barrier ─ gap ─┬─ message 0 ────────────
                                            └─ gap ─┬─ message 1 ─────────
                                                    └─ …

A gap is computation that every rank does before a message; a delay is what one rank needs on top (a straggler). Both
are slept, not computed. What several groups of ranks exchange at the same time is one message with several groups.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from stagewright.errors import UsageError
from stagewright.fabric.collectives.algorithms import MOST_RANKS, collective
from stagewright.quantity import parse_bytes

__all__ = ["MOST_BYTES", "MOST_TRIALS", "Message", "Workload", "explicit", "parse_nccl_size", "sweep_sizes"]

MOST_BYTES = 2**31  # of one message: the buffers are in memory, one for each rank
MOST_TOTAL_BYTES = 2**33
MOST_TRIALS = 10_000_000
MOST_MESSAGES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One collective of a step."""

    name: str
    """What it carries: a layer's name, a bucket, a stage's crossing."""
    algorithm: str
    """How it is sent: a name from `ALGORITHMS`."""
    num_bytes: int
    """The size as nccl-tests counts it: of the whole buffer."""
    groups: tuple[tuple[int, ...], ...]
    """The ranks that exchange it, group by group; no rank is in two."""
    gap_s: float = 0.0
    """Computation before it."""
    count: int = 1
    """How often the job sends it in one step; measured once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Everything that a fabric run sends."""

    name: str
    """For the reader: the model's name, the plan's file, "sizes"."""
    num_ranks: int
    """Ranks in all."""
    messages: tuple[Message, ...]
    """The messages of one trial, in order."""
    trials: int
    """How many trials."""
    warmup: int = 5
    """Trials before these that are not counted."""
    overlap: bool = False
    """Whether a message may start before the one before it has ended."""
    delays_s: tuple[float, ...] = ()
    """By how much each rank is late before every message."""
    seed: int = 0
    """Of the payload."""
    time_limit_s: float | None = None
    """Trials end after this time, however many there were; None: no limit."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_ranks <= MOST_RANKS:
            raise UsageError(f"{self.num_ranks} ranks can't run: use 1 to {MOST_RANKS}")
        if not 1 <= self.trials <= MOST_TRIALS:
            raise UsageError(f"{self.trials} trials can't run: use 1 to {MOST_TRIALS}")
        if not 1 <= len(self.messages) <= MOST_MESSAGES:
            raise UsageError(f"a trial of {len(self.messages)} messages can't run: use 1 to {MOST_MESSAGES}")
        if self.delays_s and len(self.delays_s) != self.num_ranks:
            raise UsageError(f"{len(self.delays_s)} delays for {self.num_ranks} ranks: give one for each")
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            raise UsageError(f"a time limit of {self.time_limit_s} s leaves no time: use more than 0")
        total = sum(message.num_bytes for message in self.messages)
        if total > MOST_TOTAL_BYTES:
            raise UsageError(f"the messages of a trial have {total} bytes; a rank holds at most {MOST_TOTAL_BYTES}")
        for message in self.messages:
            if not 0 < message.num_bytes <= MOST_BYTES:
                raise UsageError(
                    f"message {message.name!r} has {message.num_bytes} bytes; a message has 1 to {MOST_BYTES}"
                )
            members = [rank for group in message.groups for rank in group]
            if len(members) != len(set(members)) or not all(0 <= rank < self.num_ranks for rank in members):
                raise UsageError(
                    f"message {message.name!r} has the groups {message.groups}: each rank from 0 to "
                    f"{self.num_ranks - 1} may be there once"
                )
            for group in message.groups:
                collective(message.algorithm, len(group))

    @property
    def delays(self) -> tuple[float, ...]:
        """One for each rank."""
        return self.delays_s or (0.0,) * self.num_ranks

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Workload:
        """The workload in data that came over a wire or from a file; anything else in it is refused."""
        try:
            messages = tuple(
                Message(**{**one, "groups": tuple(tuple(int(rank) for rank in group) for group in one["groups"])})
                for one in data["messages"]
            )
            delays_s = tuple(float(delay) for delay in data["delays_s"])
            return cls(**{**data, "messages": messages, "delays_s": delays_s})
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"this is not a workload: {error}") from None

    def with_delays(self, delays: Mapping[int, float]) -> Workload:
        """The same with some ranks late."""
        for rank in delays:
            if not 0 <= rank < self.num_ranks:
                raise UsageError(f"rank {rank} can't be late: there are ranks 0 to {self.num_ranks - 1}")
        return replace(self, delays_s=tuple(delays.get(rank, 0.0) for rank in range(self.num_ranks)))


def explicit(
    sizes: Sequence[int],
    num_ranks: int,
    *,
    algorithm: str = "ring",
    trials: int = 100,
    name: str = "sizes",
    **more: Any,
) -> Workload:
    """One message of each size, over all ranks."""
    everyone = (tuple(range(num_ranks)),)
    messages = tuple(Message(name=f"{size} B", algorithm=algorithm, num_bytes=size, groups=everyone) for size in sizes)
    return Workload(name=name, num_ranks=num_ranks, messages=messages, trials=trials, **more)


def sweep_sizes(begin: int, end: int, factor: int) -> list[int]:
    """nccl-tests' sizes: from `begin`, each `factor` times the one before, up to `end`."""
    if begin < 1 or end < begin:
        raise UsageError(f"a sweep from {begin} to {end} bytes is empty: -b must be at least 1 and -e at least -b")
    if factor < 2:
        raise UsageError(f"a sweep with factor {factor} never ends: -f must be at least 2")
    sizes = [begin]
    while sizes[-1] * factor <= end:
        sizes.append(sizes[-1] * factor)
    return sizes


def parse_nccl_size(text: str) -> int:
    """A size as nccl-tests reads it (8, 64M: K, M and G are powers of 1024), or as elsewhere here (64MiB, 64MB)."""
    match = re.fullmatch(r"\s*(\d+)\s*([KkMmGg])\s*", text)
    if match:
        return int(match[1]) << 10 * ("kmg".index(match[2].lower()) + 1)
    return parse_bytes(text)
