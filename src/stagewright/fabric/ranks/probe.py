"""What each pair of ranks has between them: round trips of small messages, then bursts in both directions.

    for each pair, the others wait      a ──64 B──► b ──64 B──► a         16 round trips
                                        a ──64 KiB …──► b ──rate──► a     4 × larger each, until one takes long enough
                                        b ──64 KiB …──► a ──rate──► b

Collectives hide who is slow, since everybody waits for everybody; a pair alone does not.
"""

from __future__ import annotations

import socket
import statistics
import struct
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from stagewright.errors import RunError
from stagewright.fabric.ranks.connections import Connections, receive_exactly
from stagewright.fabric.ranks.sockets_engine import SocketEngine
from stagewright.fabric.ranks.tcp_info import tcp_info

__all__ = ["MOST_PAIR_RANKS", "PairProbe", "alpha_beta", "probe_pairs"]

MOST_PAIR_RANKS = 16  # with more, pairs are too many to try all
_TRIPS = 16
_PING_BYTES = 64
_FIRST_BURST = 64 * 1024
_MOST_BURST = 4 * 2**20
_ENOUGH_S = 0.025
_TRIAL = 0xFFFFFF00
_SIZE = struct.Struct("<I")
_RATE = struct.Struct("<d")
_HALF_S = 2e-3  # a second half that is shorter tells nothing
_TRIPS_ENOUGH = 8
_AGAIN = 3  # bursts of the largest size, of which the best counts


@dataclass(frozen=True, slots=True, kw_only=True)
class PairProbe:
    """One direction between two ranks."""

    source: int
    """Who sent."""
    destination: int
    """Who received."""
    latency_s: float
    """Half of the median round trip."""
    bytes_per_s: float
    """Of the best of the largest bursts: at its receiver and over its second half, when TCP has found its pace."""
    retransmits: int
    """Segments sent again during the bursts."""
    segments: int
    """Data segments sent during the bursts."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PairProbe:
        return cls(
            source=int(data["source"]),
            destination=int(data["destination"]),
            latency_s=float(data["latency_s"]),
            bytes_per_s=float(data["bytes_per_s"]),
            retransmits=int(data["retransmits"]),
            segments=int(data["segments"]),
        )


def probe_pairs(connections: Connections, engine: SocketEngine, num_ranks: int) -> list[PairProbe]:
    """All pairs, one after the other; returns the directions in which this rank sent."""
    rank = connections.rank
    found = []
    burst = bytearray(_MOST_BURST)
    for number, (one, two) in enumerate(combinations(range(num_ranks), 2)):
        engine.barrier(_TRIAL + number % 256)
        if rank not in (one, two):
            continue
        connection = connections.sockets[two if rank == one else one, 0]
        latency_s = _trips(connection, first=rank == one)
        for source in (one, two):
            if rank == source:
                before = tcp_info(connection)
                rate = _send_bursts(connection, burst, latency_s)
                after = tcp_info(connection)
                found.append(
                    PairProbe(
                        source=rank,
                        destination=two if rank == one else one,
                        latency_s=latency_s,
                        bytes_per_s=rate,
                        retransmits=after.retransmits - before.retransmits,
                        segments=after.segments - before.segments,
                    )
                )
            else:
                _take_bursts(connection, burst)
    engine.barrier(_TRIAL)
    return found


def _trips(connection: socket.socket, *, first: bool) -> float:
    """Half of the median round trip, on both sides."""
    ping = bytes(_PING_BYTES)
    times_s = []
    for _ in range(_TRIPS):
        begin = time.perf_counter()
        if first:
            connection.sendall(ping)
            receive_exactly(connection, _PING_BYTES)
        else:
            receive_exactly(connection, _PING_BYTES)
            connection.sendall(ping)
        times_s.append(time.perf_counter() - begin)
    # The other side's waits hold the same round trips, but its first one holds the wait for the barrier.
    return statistics.median(times_s[1:]) / 2


def _send_bursts(connection: socket.socket, burst: bytearray, latency_s: float) -> float:
    view = memoryview(burst)
    size, best, again = _FIRST_BURST, 0.0, _AGAIN
    while True:
        begin = time.perf_counter()
        connection.sendall(_SIZE.pack(size))
        connection.sendall(view[:size])
        (seen,) = _RATE.unpack(receive_exactly(connection, _RATE.size))
        taken_s = time.perf_counter() - begin
        rate = seen or size / max(taken_s - 2 * latency_s, 0.1 * taken_s)
        if taken_s < max(_ENOUGH_S, 2 * _TRIPS_ENOUGH * latency_s) and size * 4 <= len(burst):
            size *= 4
            continue
        # A busy host may slow one burst; a slow link slows all.
        best, again = max(best, rate), again - 1
        if again == 0:
            connection.sendall(_SIZE.pack(0))
            return best


def _take_bursts(connection: socket.socket, burst: bytearray) -> None:
    view = memoryview(burst)
    while True:
        (size,) = _SIZE.unpack(receive_exactly(connection, _SIZE.size))
        if size == 0:
            return
        got, half_got, half_s = 0, 0, 0.0
        while got < size:
            more = connection.recv_into(view[: size - got])
            if not more:
                raise RunError("a probe ended in the middle: the other rank closed the connection")
            got += more
            if not half_got and got >= size // 2:
                half_got, half_s = got, time.perf_counter()
        taken_s = time.perf_counter() - half_s
        connection.sendall(_RATE.pack((size - half_got) / taken_s if taken_s >= _HALF_S else 0.0))


def alpha_beta(probes: list[PairProbe]) -> tuple[float, float] | None:
    """Latency and rate of the best pair: what the network can do where nothing is wrong."""
    if not probes:
        return None
    return min(probe.latency_s for probe in probes), max(probe.bytes_per_s for probe in probes)
