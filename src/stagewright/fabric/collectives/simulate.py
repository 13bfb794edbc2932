"""Collectives without a network: are the moves right, what does each rank send, how long would it take at best.

Moves of one step read what was there before the step. A chunk may not be written and sent, or written twice by copies,
in the same step at the same rank: an engine would send half of each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from stagewright.fabric.collectives.collective import Collective

__all__ = ["bytes_sent", "execute", "faults", "ideal_s"]


def faults(collective: Collective) -> list[str]:
    """What is wrong with the moves, in sentences; nothing where the result is right."""
    held = dict(collective.before)
    found = []
    for step, moves in groupby(collective.moves, key=lambda move: move.step):
        snapshot = dict(held)
        sent = set()
        written: set[tuple[int, int]] = set()
        for move in moves:
            source, destination = (move.source, move.chunk), (move.destination, move.chunk)
            if move.source == move.destination:
                found.append(f"step {step}: rank {move.source} sends chunk {move.chunk} to itself")
            if source not in snapshot:
                found.append(f"step {step}: rank {move.source} sends chunk {move.chunk}, which it does not have")
                continue
            sent.add(source)
            if move.action == "reduce":
                if held.get(destination, 0) & snapshot[source]:
                    found.append(f"step {step}: rank {move.destination} adds a value to chunk {move.chunk} twice")
                held[destination] = held.get(destination, 0) | snapshot[source]
            else:
                if destination in written:
                    found.append(f"step {step}: chunk {move.chunk} of rank {move.destination} is written twice")
                held[destination] = snapshot[source]
            written.add(destination)
        found += [f"step {step}: rank {rank} sends chunk {chunk} while it changes" for rank, chunk in sent & written]
    for (rank, chunk), wanted in collective.after.items():
        if held.get((rank, chunk)) != wanted:
            found.append(f"at the end chunk {chunk} of rank {rank} holds {held.get((rank, chunk))}, not {wanted}")
    return found


def execute(
    collective: Collective, buffers: Sequence[dict[int, npt.NDArray[np.float64]]]
) -> list[dict[int, npt.NDArray[np.float64]]]:
    """The moves on real numbers: each rank's chunks before, and after."""
    held = [{chunk: values.copy() for chunk, values in own.items()} for own in buffers]
    for _, moves in groupby(collective.moves, key=lambda move: move.step):
        arriving = [(move, held[move.source][move.chunk].copy()) for move in moves]
        for move, values in arriving:
            if move.action == "reduce" and move.chunk in held[move.destination]:
                values = held[move.destination][move.chunk] + values
            held[move.destination][move.chunk] = values
    return held


def bytes_sent(collective: Collective, size: int) -> list[int]:
    """What each rank sends in all."""
    sizes = collective.chunk_sizes(size)
    sent = [0] * collective.num_ranks
    for move in collective.moves:
        sent[move.source] += sizes[move.chunk]
    return sent


def ideal_s(collective: Collective, size: int, latency_s: float, bytes_per_s: float) -> float:
    """Time at best where a message of n bytes takes latency + n / bandwidth and each rank sends one at a time (α–β).

    Trees are sliced and both trees' directions overlap, so their bytes count once for the busiest rank.
    """
    sizes = collective.chunk_sizes(size)
    if collective.algorithm in ("double-tree", "binomial-tree", "chain"):
        return collective.num_steps * latency_s + max(bytes_sent(collective, size), default=0) / bytes_per_s
    total_s = 0.0
    for _, moves in groupby(collective.moves, key=lambda move: move.step):
        sends: dict[tuple[int, int], int] = defaultdict(int)
        for move in moves:
            sends[move.source, move.destination] += sizes[move.chunk]
        # A rank that sends to two others in one step shares its link between them.
        each: dict[int, int] = defaultdict(int)
        for (source, _), amount in sends.items():
            each[source] += amount
        total_s += latency_s + max(each.values()) / bytes_per_s
    return total_s
