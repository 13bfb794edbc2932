"""Ring algorithms: all-reduce in one or both directions, reduce-scatter and all-gather.

reduce-scatter   step s: rank r sends chunk r − s, which the next rank reduces; after n − 1 steps rank r has the
                 sum of chunk r + 1
all-gather       step s: rank r sends chunk r + 1 − s; after n − 1 steps all ranks have all chunks
"""

from __future__ import annotations

from stagewright.fabric.collectives.collective import Action, Collective, Move, all_reduce


def ring(num_ranks: int) -> Collective:
    """All-reduce in 2(n − 1) steps; every rank sends 2(n − 1)/n of the buffer."""
    return all_reduce("ring", num_ranks, num_ranks, _around(num_ranks, 1, first_chunk=0))


def bidirectional_ring(num_ranks: int) -> Collective:
    """All-reduce with half of the buffer in each direction, which uses full-duplex links."""
    moves = _around(num_ranks, 1, first_chunk=0) + _around(num_ranks, -1, first_chunk=num_ranks)
    return all_reduce("bidirectional-ring", num_ranks, 2 * num_ranks, sorted(moves, key=lambda move: move.step))


def reduce_scatter(num_ranks: int) -> Collective:
    """Reduce-scatter in n − 1 steps; rank r ends with the sum of chunk r."""
    all_ranks = (1 << num_ranks) - 1
    return Collective(
        kind="reduce-scatter",
        algorithm="ring",
        num_ranks=num_ranks,
        num_chunks=num_ranks,
        moves=tuple(_half(num_ranks, 0, 1, 0, "reduce", shift=-1)),
        before={(rank, chunk): 1 << rank for rank in range(num_ranks) for chunk in range(num_ranks)},
        after={(rank, rank): all_ranks for rank in range(num_ranks)},
    )


def all_gather(num_ranks: int) -> Collective:
    """All-gather in n − 1 steps; rank r begins with chunk r and ends with all."""
    return Collective(
        kind="all-gather",
        algorithm="ring",
        num_ranks=num_ranks,
        num_chunks=num_ranks,
        moves=tuple(_half(num_ranks, 0, 1, 0, "copy", shift=0)),
        before={(rank, rank): 1 << rank for rank in range(num_ranks)},
        after={(rank, chunk): 1 << chunk for rank in range(num_ranks) for chunk in range(num_ranks)},
    )


def _around(num_ranks: int, direction: int, first_chunk: int) -> list[Move]:
    """Return the moves of an all-reduce in one direction."""
    reduces = _half(num_ranks, 0, direction, first_chunk, "reduce", shift=0)
    return reduces + _half(num_ranks, num_ranks - 1, direction, first_chunk, "copy", shift=1)


def _half(n: int, first_step: int, direction: int, first_chunk: int, action: Action, *, shift: int) -> list[Move]:
    """Return the moves of n − 1 steps; a rank's first chunk is its rank plus `shift`."""
    return [
        Move(first_step + s, rank, (rank + direction) % n, first_chunk + (direction * rank + shift - s) % n, action)
        for s in range(n - 1)
        for rank in range(n)
    ]
