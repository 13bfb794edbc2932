"""A collective as data: which rank sends which chunk to which rank in which step, to be reduced or copied there.

    ring all-reduce of 3 ranks, chunk 0            (step, source, destination, chunk, action)
                                                   (0, 0, 1, 0, reduce)
    rank 0 ──+──► rank 1 ──+──► rank 2             (1, 1, 2, 0, reduce)
    rank 0 ◄───── rank 2                           (2, 2, 0, 0, copy)
    rank 0 ─────► rank 1                           (3, 0, 1, 0, copy)

`before` and `after` define what each rank holds, as sets of contributions, so that moves can be checked without a
network (`simulate`) and executed by any engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Action: TypeAlias = Literal["reduce", "copy"]
Kind: TypeAlias = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "pipeline"]
# (rank, chunk) → the ranks whose values are summed in it, as the bits of an integer.
Holding: TypeAlias = Mapping[tuple[int, int], int]


class Move(NamedTuple):
    """One chunk sent from one rank to another."""

    step: int
    """Moves of one step may run concurrently."""
    source: int
    destination: int
    chunk: int
    action: Action
    """What the destination does with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One algorithm for a number of ranks, independent of the buffer size."""

    kind: Kind
    algorithm: str
    """ring, halving-doubling, …"""
    num_ranks: int
    num_chunks: int
    """Chunks per buffer; for all-to-all, of each rank's buffer."""
    moves: tuple[Move, ...]
    """Ordered by step."""
    before: Holding
    """Initial contents of each rank."""
    after: Holding
    """Required final contents; unnamed chunks may hold anything."""

    @property
    def num_steps(self) -> int:
        return self.moves[-1].step + 1 if self.moves else 0

    def chunk_sizes(self, size: int) -> list[int]:
        """Return the size of each chunk; the first ones may be larger by one."""
        bounds = chunk_bounds(size, self.num_chunks)
        sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
        # all-to-all numbers its chunks source · n + destination, and each source has a separate buffer.
        return sizes * self.num_ranks if self.kind == "all-to-all" else sizes


def all_reduce(algorithm: str, num_ranks: int, num_chunks: int, moves: Iterable[Move]) -> Collective:
    """Return an all-reduce: every rank begins with its own values and ends with the sum of all."""
    cells = [(rank, chunk) for rank in range(num_ranks) for chunk in range(num_chunks)]
    return Collective(
        kind="all-reduce",
        algorithm=algorithm,
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        moves=tuple(moves),
        before={(rank, chunk): 1 << rank for rank, chunk in cells},
        after=dict.fromkeys(cells, (1 << num_ranks) - 1),
    )


def chunk_bounds(size: int, num_chunks: int) -> list[int]:
    """Split a buffer into chunks of nearly equal size; return their boundaries."""
    size_each, num_larger = divmod(size, num_chunks)
    return [index * size_each + min(index, num_larger) for index in range(num_chunks + 1)]
