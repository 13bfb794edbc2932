"""A collective as data: who sends which chunk to whom in which step, and whether it is added or copied there.

    ring all-reduce of 3 ranks, chunk 0            (step, source, destination, chunk, action)
                                                   (0, 0, 1, 0, reduce)
    rank 0 ──+──► rank 1 ──+──► rank 2             (1, 1, 2, 0, reduce)
    rank 0 ◄───── rank 2                           (2, 2, 0, 0, copy)
    rank 0 ─────► rank 1                           (3, 0, 1, 0, copy)

Nothing here sends anything. `before` and `after` say what each rank holds, as sets of contributions, so that the moves
can be checked without a network (`simulate`) and executed by any engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

__all__ = ["Action", "Collective", "Holding", "Kind", "Move", "chunk_bounds"]

Action: TypeAlias = Literal["reduce", "copy"]
Kind: TypeAlias = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "pipeline"]
# (rank, chunk) → the ranks whose values are summed in it, as the bits of an integer.
Holding: TypeAlias = Mapping[tuple[int, int], int]


class Move(NamedTuple):
    """One chunk on its way from one rank to another."""

    step: int  # moves of one step may happen at the same time
    source: int
    destination: int
    chunk: int
    action: Action  # what the destination does with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One algorithm for one number of ranks; sizes come later."""

    kind: Kind
    """What it computes."""
    algorithm: str
    """How: ring, halving-doubling, …"""
    num_ranks: int
    """Ranks that take part."""
    num_chunks: int
    """Chunks that the buffer of one rank is cut into; for all-to-all each rank's own buffer has this many."""
    moves: tuple[Move, ...]
    """What is sent, by rising step."""
    before: Holding
    """What each rank holds at the start."""
    after: Holding
    """What each rank must hold at the end; chunks that are not named may hold anything."""

    @property
    def num_steps(self) -> int:
        """Steps one after another."""
        return self.moves[-1].step + 1 if self.moves else 0

    def chunk_sizes(self, size: int) -> list[int]:
        """The size of each chunk by its number, of a buffer of that size; the first ones may be one larger."""
        bounds = chunk_bounds(size, self.num_chunks)
        sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
        # all-to-all numbers its chunks source · n + destination, and every source has a buffer of its own.
        return sizes * self.num_ranks if self.kind == "all-to-all" else sizes


def chunk_bounds(size: int, num_chunks: int) -> list[int]:
    """Where the chunks of a buffer begin and end, as equal as can be."""
    each, more = divmod(size, num_chunks)
    return [index * each + min(index, more) for index in range(num_chunks + 1)]
