"""The workload of a fabric run: the messages of one training step, their number and order, and stragglers.

    one trial, serial        barrier ─ gap ─ message 0 ─ barrier ─ gap ─ message 1 ─ …
    one trial, overlapped    barrier ─ gap ─┬─ message 0 ────────────
                                            └─ gap ─┬─ message 1 ─────────
                                                    └─ …

A gap is the computation of every rank before a message; a delay is the extra time of one rank (a straggler). Ranks
sleep for both. Messages that several groups of ranks exchange concurrently are one message with several groups.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from stagewright.errors import UsageError
from stagewright.fabric.collectives.algorithms import MAX_RANKS, collective
from stagewright.quantity import parse_bytes

MAX_BYTES = 2**31  # per message: every rank holds a buffer in memory
MAX_TOTAL_BYTES = 2**33
MAX_TRIALS = 10_000_000
MAX_MESSAGES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One collective of a step."""

    name: str
    """The layer, bucket or crossing that it carries."""
    algorithm: str
    """A name in `ALGORITHMS`."""
    num_bytes: int
    """Size of the whole buffer, as nccl-tests counts it."""
    groups: tuple[tuple[int, ...], ...]
    """The ranks of each group; no rank is in two groups."""
    gap_s: float = 0.0
    """Computation before the message."""
    count: int = 1
    """How often one training step sends it; a trial measures it once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The messages and trials of a fabric run."""

    name: str
    """Shown to users: the model, the plan's file, "sizes"."""
    num_ranks: int
    messages: tuple[Message, ...]
    """Messages of one trial, in order."""
    trials: int
    warmup: int = 5
    """Unmeasured trials at the start."""
    overlap: bool = False
    """Whether a message may start before the previous one ends."""
    delays_s: tuple[float, ...] = ()
    """Extra delay of each rank before every message."""
    seed: int = 0
    time_limit_s: float | None = None
    """No new trial starts after this time; None: no limit."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_ranks <= MAX_RANKS:
            raise UsageError(f"a workload cannot have {self.num_ranks} ranks; use 1 to {MAX_RANKS}")
        if not 1 <= self.trials <= MAX_TRIALS:
            raise UsageError(f"a workload cannot have {self.trials} trials; use 1 to {MAX_TRIALS}")
        if not 1 <= len(self.messages) <= MAX_MESSAGES:
            raise UsageError(f"a trial cannot have {len(self.messages)} messages; use 1 to {MAX_MESSAGES}")
        if self.delays_s and len(self.delays_s) != self.num_ranks:
            raise UsageError(f"{len(self.delays_s)} delays for {self.num_ranks} ranks; give one per rank")
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            raise UsageError(f"the time limit is {self.time_limit_s} s; use more than 0")
        total = sum(message.num_bytes for message in self.messages)
        if total > MAX_TOTAL_BYTES:
            raise UsageError(f"the messages of a trial have {total} bytes; the limit is {MAX_TOTAL_BYTES}")
        for message in self.messages:
            if not 0 < message.num_bytes <= MAX_BYTES:
                raise UsageError(f"message {message.name!r} has {message.num_bytes} bytes; use 1 to {MAX_BYTES}")
            members = [rank for group in message.groups for rank in group]
            if len(members) != len(set(members)) or not all(0 <= rank < self.num_ranks for rank in members):
                raise UsageError(
                    f"message {message.name!r} has the groups {message.groups}; each rank from 0 to "
                    f"{self.num_ranks - 1} may occur once"
                )
            for group in message.groups:
                collective(message.algorithm, len(group))

    @property
    def delays(self) -> tuple[float, ...]:
        """The delay of each rank."""
        return self.delays_s or (0.0,) * self.num_ranks

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Workload:
        """Read a workload from JSON; reject unknown fields."""
        try:
            messages = tuple(
                Message(**{**fields, "groups": tuple(tuple(int(rank) for rank in group) for group in fields["groups"])})
                for fields in data["messages"]
            )
            delays_s = tuple(float(delay) for delay in data["delays_s"])
            return cls(**{**data, "messages": messages, "delays_s": delays_s})
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"not a workload: {error}") from None

    def with_delays(self, delays: Mapping[int, float]) -> Workload:
        """Return the workload with delayed ranks (stragglers)."""
        for rank in delays:
            if not 0 <= rank < self.num_ranks:
                raise UsageError(f"rank {rank} cannot be delayed: the ranks are 0 to {self.num_ranks - 1}")
        return replace(self, delays_s=tuple(delays.get(rank, 0.0) for rank in range(self.num_ranks)))


def from_sizes(
    sizes: Sequence[int],
    num_ranks: int,
    *,
    algorithm: str = "ring",
    trials: int = 100,
    name: str = "sizes",
    **more: Any,
) -> Workload:
    """Create a workload with one message per size between all ranks."""
    all_ranks = (tuple(range(num_ranks)),)
    messages = tuple(Message(name=f"{size} B", algorithm=algorithm, num_bytes=size, groups=all_ranks) for size in sizes)
    return Workload(name=name, num_ranks=num_ranks, messages=messages, trials=trials, **more)


def sweep_sizes(begin: int, end: int, factor: int) -> list[int]:
    """Return the sizes of an nccl-tests sweep: from `begin` to `end`, each `factor` times the previous."""
    if begin < 1 or end < begin:
        raise UsageError(f"a sweep from {begin} to {end} bytes is empty; -b must be at least 1 and -e at least -b")
    if factor < 2:
        raise UsageError(f"a sweep with factor {factor} never ends; -f must be at least 2")
    sizes = [begin]
    while sizes[-1] * factor <= end:
        sizes.append(sizes[-1] * factor)
    return sizes


def parse_nccl_size(text: str) -> int:
    """Parse a size as in nccl-tests (8, 64M: K, M and G are powers of 1024) or with a unit (64MiB, 64MB)."""
    match = re.fullmatch(r"\s*(\d+)\s*([KkMmGg])\s*", text)
    if match:
        return int(match[1]) << 10 * ("kmg".index(match[2].lower()) + 1)
    return parse_bytes(text)
