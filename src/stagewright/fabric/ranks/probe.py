"""Probes of each pair of ranks: round trips of small messages, then bursts in both directions.

    one pair at a time                  a ──64 B──► b ──64 B──► a         16 round trips
                                        a ──64 KiB …──► b ──rate──► a     4 × larger each time, until long enough
                                        b ──64 KiB …──► a ──rate──► b

In a collective all ranks wait for each other, which hides the slow one; an isolated pair does not.
"""

from __future__ import annotations

import socket
import statistics
import struct
import time
from dataclasses import dataclass
from itertools import combinations

from stagewright.errors import RunError
from stagewright.fabric.ranks.connections import Connections, receive_exactly
from stagewright.fabric.ranks.sockets_engine import SocketEngine
from stagewright.fabric.ranks.tcp_info import tcp_info

MAX_PAIR_RANKS = 16  # with more ranks, there are too many pairs
_TRIPS = 16
_PING_BYTES = 64
_FIRST_BURST = 64 * 1024
_MAX_BURST = 4 * 2**20
_MIN_BURST_S = 0.025
_TRIAL = 0xFFFFFF00
_SIZE = struct.Struct("<I")
_RATE = struct.Struct("<d")
_MIN_HALF_S = 2e-3  # a shorter second half is not informative
_MIN_ROUND_TRIPS = 8
_REPEATS = 3  # bursts of the largest size; the fastest counts


@dataclass(frozen=True, slots=True, kw_only=True)
class PairProbe:
    """One direction between two ranks."""

    source: int
    destination: int
    latency_s: float
    """Half of the median round trip."""
    bytes_per_s: float
    """Rate of the fastest burst at the receiver over its second half, after TCP's slow start."""
    retransmits: int
    """Retransmitted segments during the bursts."""
    segments: int
    """Data segments sent during the bursts."""


def probe_pairs(connections: Connections, engine: SocketEngine, num_ranks: int) -> list[PairProbe]:
    """Probe all pairs one after another; return the directions in which this rank sent."""
    rank = connections.rank
    probes = []
    burst = bytearray(_MAX_BURST)
    for number, (first, second) in enumerate(combinations(range(num_ranks), 2)):
        engine.barrier(_TRIAL + number % 256)
        if rank not in (first, second):
            continue
        connection = connections.sockets[second if rank == first else first, 0]
        latency_s = _measure_latency(connection, starts=rank == first)
        for source in (first, second):
            if rank == source:
                before = tcp_info(connection)
                rate = _send_bursts(connection, burst, latency_s)
                after = tcp_info(connection)
                probe = PairProbe(
                    source=rank,
                    destination=second if rank == first else first,
                    latency_s=latency_s,
                    bytes_per_s=rate,
                    retransmits=after.retransmits - before.retransmits,
                    segments=after.segments - before.segments,
                )
                probes.append(probe)
            else:
                _receive_bursts(connection, burst)
    engine.barrier(_TRIAL)
    return probes


def _measure_latency(connection: socket.socket, *, starts: bool) -> float:
    """Return half of the median round trip, on both sides."""
    ping = bytes(_PING_BYTES)
    times_s = []
    for _ in range(_TRIPS):
        begin = time.perf_counter()
        if starts:
            connection.sendall(ping)
            receive_exactly(connection, _PING_BYTES)
        else:
            receive_exactly(connection, _PING_BYTES)
            connection.sendall(ping)
        times_s.append(time.perf_counter() - begin)
    # The passive side times the same round trips; its first one includes the wait for the barrier.
    return statistics.median(times_s[1:]) / 2


def _send_bursts(connection: socket.socket, burst: bytearray, latency_s: float) -> float:
    view = memoryview(burst)
    size, best, repeats = _FIRST_BURST, 0.0, _REPEATS
    while True:
        begin = time.perf_counter()
        connection.sendall(_SIZE.pack(size))
        connection.sendall(view[:size])
        (receiver_rate,) = _RATE.unpack(receive_exactly(connection, _RATE.size))
        taken_s = time.perf_counter() - begin
        rate = receiver_rate or size / max(taken_s - 2 * latency_s, 0.1 * taken_s)
        if taken_s < max(_MIN_BURST_S, 2 * _MIN_ROUND_TRIPS * latency_s) and size * 4 <= len(burst):
            size *= 4
            continue
        # A busy host may slow down one burst; a slow link slows down all.
        best, repeats = max(best, rate), repeats - 1
        if repeats == 0:
            connection.sendall(_SIZE.pack(0))
            return best


def _receive_bursts(connection: socket.socket, burst: bytearray) -> None:
    view = memoryview(burst)
    while True:
        (size,) = _SIZE.unpack(receive_exactly(connection, _SIZE.size))
        if size == 0:
            return
        got, half_got, half_s = 0, 0, 0.0
        while got < size:
            more = connection.recv_into(view[: size - got])
            if not more:
                raise RunError("a probe was interrupted: the other rank closed the connection")
            got += more
            if not half_got and got >= size // 2:
                half_got, half_s = got, time.perf_counter()
        taken_s = time.perf_counter() - half_s
        connection.sendall(_RATE.pack((size - half_got) / taken_s if taken_s >= _MIN_HALF_S else 0.0))


def alpha_beta(probes: list[PairProbe]) -> tuple[float, float] | None:
    """Return the lowest latency and the highest rate of all pairs: the network without faults (α–β model)."""
    if not probes:
        return None
    return min(probe.latency_s for probe in probes), max(probe.bytes_per_s for probe in probes)
