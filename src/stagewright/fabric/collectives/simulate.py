"""Simulation of collectives without a network: bytes sent and ideal time."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby

from stagewright.fabric.collectives.collective import Collective


def bytes_sent(collective: Collective, size: int) -> list[int]:
    """Return the bytes that each rank sends."""
    sizes = collective.chunk_sizes(size)
    sent = [0] * collective.num_ranks
    for move in collective.moves:
        sent[move.source] += sizes[move.chunk]
    return sent


def ideal_s(collective: Collective, size: int, latency_s: float, bytes_per_s: float) -> float:
    """Return the ideal time in the α–β model: a message takes latency + bytes / bandwidth, one at a time per rank.

    Trees are sliced and their directions overlap, so the bytes of the busiest rank count once.
    """
    sizes = collective.chunk_sizes(size)
    if collective.algorithm in ("double-tree", "binomial-tree", "chain"):
        return collective.num_steps * latency_s + max(bytes_sent(collective, size), default=0) / bytes_per_s
    total_s = 0.0
    for _, moves in groupby(collective.moves, key=lambda move: move.step):
        sent_bytes: dict[int, int] = defaultdict(int)  # two sends of a rank in one step share its link
        for move in moves:
            sent_bytes[move.source] += sizes[move.chunk]
        total_s += latency_s + max(sent_bytes.values()) / bytes_per_s
    return total_s
