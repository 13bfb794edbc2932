"""Simulation of collectives without a network: correctness of the moves, bytes sent, ideal time.

Moves of a step read the state before the step. In one step a rank must not both write and send a chunk, nor copy into
it twice: an engine would send a mix of both.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby

from stagewright.fabric.collectives.collective import Collective


def find_errors(collective: Collective) -> list[str]:
    """Return the errors of the moves as sentences; empty if the result is correct."""
    held = dict(collective.before)
    errors = []
    for step, moves in groupby(collective.moves, key=lambda move: move.step):
        snapshot = dict(held)
        sent = set()
        written: set[tuple[int, int]] = set()
        for move in moves:
            source, destination = (move.source, move.chunk), (move.destination, move.chunk)
            if move.source == move.destination:
                errors.append(f"step {step}: rank {move.source} sends chunk {move.chunk} to itself")
            if source not in snapshot:
                errors.append(f"step {step}: rank {move.source} sends chunk {move.chunk}, which it does not have")
                continue
            sent.add(source)
            if move.action == "reduce":
                if held.get(destination, 0) & snapshot[source]:
                    errors.append(f"step {step}: rank {move.destination} reduces a value into chunk {move.chunk} twice")
                held[destination] = held.get(destination, 0) | snapshot[source]
            else:
                if destination in written:
                    errors.append(f"step {step}: chunk {move.chunk} of rank {move.destination} is written twice")
                held[destination] = snapshot[source]
            written.add(destination)
        errors += [f"step {step}: rank {rank} sends chunk {chunk} while it changes" for rank, chunk in sent & written]
    for (rank, chunk), expected in collective.after.items():
        if held.get((rank, chunk)) != expected:
            errors.append(f"at the end chunk {chunk} of rank {rank} is {held.get((rank, chunk))}, expected {expected}")
    return errors


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
