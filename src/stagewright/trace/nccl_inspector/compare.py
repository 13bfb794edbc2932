"""The collectives of a job from the logs of all its ranks: bandwidth, waiting, the late rank and the slow link.

    rank 0   ▕ waits      ▕ transfer ▏     a kernel runs from its launch to the end of the collective, so the rank that
    rank 1   ▕ waits      ▕ transfer ▏     comes last has the shortest one, and the others wait for it
    rank 2                ▕ transfer ▏

A send and its receive are one transfer, which takes as long as the shorter of the two.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from stagewright.errors import UsageError
from stagewright.quantity import format_s
from stagewright.trace.nccl_inspector.log_file import Operation, read_log

MIN_CALLS = 4
"""Calls from which a rank or link is judged."""
_LAST = 0.8  # of the calls in which a late rank comes last
_MIN_WAIT = 0.1  # of the time in collectives that its peers wait for a late rank
_SLOW_LINK = 0.5  # of the other links' bandwidth

Calls: TypeAlias = Mapping[int, Mapping[int, Operation]]
"""By sequence number and rank, of the calls that every recorded rank has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """A collective on one rank."""

    rank: int
    host: str
    pid: int
    num_calls: int
    median_s: float
    bus_bandwidth: float
    """Bytes/s, median."""
    wait_s: float
    """Mean time beyond that of the rank that came last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTimes:
    """One kind and size of collective in one communicator."""

    communicator: str
    name: str
    num_ranks: int
    num_nodes: int
    collective: str
    bytes: int
    num_calls: int
    median_s: float
    """On all ranks."""
    transfer_s: float
    """Median over the calls of the shortest rank: without waiting."""
    bus_bandwidth: float
    """Bytes/s without waiting: of the rank that came last."""
    ranks: tuple[RankTimes, ...]

    @property
    def wait(self) -> float:
        """Share of the time that ranks wait for the last one."""
        total_s = sum(rank.median_s for rank in self.ranks)
        return min(1.0, sum(rank.wait_s for rank in self.ranks) / total_s) if total_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """Messages of one size from one rank to another."""

    communicator: str
    source: int
    target: int
    bytes: int
    num_calls: int
    median_s: float
    """Of the side that came last."""
    bandwidth: float
    """Bytes/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectorFinding:
    """Who slows the communication down."""

    kind: str
    """late or link."""
    communicator: str
    ranks: tuple[int, ...]
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectorReport:
    """What the logs of a job show."""

    collectives: tuple[CollectiveTimes, ...]
    """Most time first."""
    links: tuple[LinkTimes, ...]
    findings: tuple[InspectorFinding, ...]

    def to_dict(self) -> dict[str, Any]:
        collectives = [{**asdict(entry), "wait": entry.wait} for entry in self.collectives]
        return {**asdict(self), "collectives": collectives}


def compare_logs(paths: Sequence[Path]) -> InspectorReport:
    """Read the logs of a job's processes, and compare its ranks and links."""
    operations = [operation for path in paths for operation in read_log(path)]
    if not operations:
        raise UsageError(
            f"{paths[0]} has no operations; were messages smaller than NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES?"
        )
    collectives: list[CollectiveTimes] = []
    links: list[LinkTimes] = []
    findings: list[InspectorFinding] = []
    for own in _grouped(operations, lambda operation: operation.communicator):
        sets = _collectives(own)
        collectives += [_times(calls, operations_of_kind) for calls, operations_of_kind in sets]
        findings += _late(own[0], [calls for calls, _ in sets])
        for messages in _grouped((o for o in own if o.peer is not None), lambda operation: operation.bytes):
            compared = _links(messages)
            links += compared
            findings += _slow_links(own[0], compared)
    collectives.sort(key=lambda times: -times.median_s * times.num_calls)
    return InspectorReport(collectives=tuple(collectives), links=tuple(links), findings=tuple(findings))


def _collectives(operations: Sequence[Operation]) -> list[tuple[Calls, list[Operation]]]:
    """Return the calls of each kind and size of collective, and all of its operations."""
    kinds: list[tuple[Calls, list[Operation]]] = []
    for own in _grouped((o for o in operations if o.peer is None), lambda o: (o.kind, o.bytes)):
        ranks = {operation.rank for operation in own}
        by_number: dict[int, dict[int, Operation]] = {}
        for operation in own:
            by_number.setdefault(operation.number, {})[operation.rank] = operation
        kinds.append(({n: calls for n, calls in by_number.items() if len(calls) == len(ranks)}, own))
    return kinds


def _times(calls: Calls, operations: Sequence[Operation]) -> CollectiveTimes:
    about = operations[0]
    last = [min(call.values(), key=lambda operation: operation.seconds) for call in calls.values()]
    last = last or list(operations)
    shortest_s = {number: min(o.seconds for o in call.values()) for number, call in calls.items()}
    ranks = []
    for own in sorted(_grouped(operations, lambda operation: operation.rank), key=lambda own: own[0].rank):
        waits = [o.seconds - shortest_s[o.number] for o in own if o.number in shortest_s]
        ranks.append(
            RankTimes(
                rank=own[0].rank,
                host=own[0].host,
                pid=own[0].pid,
                num_calls=len(own),
                median_s=_median(o.seconds for o in own),
                bus_bandwidth=_median(o.bus_bandwidth for o in own),
                wait_s=statistics.fmean(waits) if waits else 0.0,
            )
        )
    return CollectiveTimes(
        communicator=about.communicator,
        name=about.name,
        num_ranks=about.num_ranks,
        num_nodes=about.num_nodes,
        collective=about.kind,
        bytes=about.bytes,
        num_calls=max(rank.num_calls for rank in ranks),
        median_s=_median(o.seconds for o in operations),
        transfer_s=_median(o.seconds for o in last),
        bus_bandwidth=_median(o.bus_bandwidth for o in last),
        ranks=tuple(ranks),
    )


def _late(about: Operation, sets: Sequence[Calls]) -> Iterator[InspectorFinding]:
    """Name the rank for which the others wait in nearly all collectives of a communicator."""
    calls = [call for by_number in sets for call in by_number.values() if len(call) > 1]
    calls = [call for call in calls if all(operation.is_kernel_time for operation in call.values())]
    if len(calls) < MIN_CALLS:
        return
    last: dict[int, int] = {}
    waits: dict[int, float] = {}
    for call in calls:
        rank = min(call, key=lambda rank: call[rank].seconds)
        others_s = _median(operation.seconds for other, operation in call.items() if other != rank)
        last[rank] = last.get(rank, 0) + 1
        waits[rank] = waits.get(rank, 0.0) + others_s - call[rank].seconds
    rank = max(last, key=lambda rank: last[rank])
    total_s = sum(_median(operation.seconds for operation in call.values()) for call in calls)
    if last[rank] < _LAST * len(calls) or waits[rank] < _MIN_WAIT * total_s:
        return
    who = next(call[rank] for call in calls if rank in call)
    yield InspectorFinding(
        kind="late",
        communicator=about.communicator,
        ranks=(rank,),
        sentence=f"Rank {rank} of {_label(about)}, on {who.host} with pid {who.pid}, joins last in {last[rank]} of "
        f"{len(calls)} collectives: the others wait {format_s(waits[rank] / last[rank])} for it each time; "
        "look for slower compute, data loading or garbage collection there: stagewright attach",
    )


def _links(messages: Sequence[Operation]) -> list[LinkTimes]:
    """Return the transfers between each two ranks, of one size."""

    def ends(operation: Operation) -> tuple[int, int]:
        assert operation.peer is not None
        return (operation.peer, operation.rank) if operation.kind == "Recv" else (operation.rank, operation.peer)

    links = []
    for own in _grouped(messages, ends):
        source, target = ends(own[0])
        sides = _grouped(own, lambda operation: operation.rank)
        seconds = min(_median(operation.seconds for operation in side) for side in sides)
        links.append(
            LinkTimes(
                communicator=own[0].communicator,
                source=source,
                target=target,
                bytes=own[0].bytes,
                num_calls=max(len(side) for side in sides),
                median_s=seconds,
                bandwidth=own[0].bytes / seconds if seconds else 0.0,
            )
        )
    return links


def _slow_links(about: Operation, links: Sequence[LinkTimes]) -> Iterator[InspectorFinding]:
    judged = [link for link in links if link.num_calls >= MIN_CALLS and link.bandwidth > 0]
    for link in judged:
        ends = {link.source, link.target}
        others = [other.bandwidth for other in judged if {other.source, other.target} != ends]
        if not others or link.bandwidth >= _SLOW_LINK * statistics.median(others):
            continue
        yield InspectorFinding(
            kind="link",
            communicator=about.communicator,
            ranks=(link.source, link.target),
            sentence=f"Messages of {link.bytes} bytes from rank {link.source} to rank {link.target} of {_label(about)} "
            f"reach {link.bandwidth / 1e9:.3g} GB/s, on other links {statistics.median(others) / 1e9:.3g} GB/s: check "
            "the network between the two hosts: stagewright fabric run",
        )


def _label(operation: Operation) -> str:
    return (
        f"{operation.name} ({operation.communicator})" if operation.name else f"communicator {operation.communicator}"
    )


def _grouped(operations: Iterable[Operation], key: Any) -> list[list[Operation]]:
    groups: dict[Any, list[Operation]] = {}
    for operation in operations:
        groups.setdefault(key(operation), []).append(operation)
    return list(groups.values())


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))
