"""Collectives without reduction: all-to-all, and the sends of a pipeline."""

from __future__ import annotations

from stagewright.fabric.collectives.collective import Collective, Move


def all_to_all(num_ranks: int) -> Collective:
    """Send a chunk from every rank to every peer; in step s each rank sends to the rank s + 1 further on."""
    n = num_ranks
    return Collective(
        kind="all-to-all",
        algorithm="pairwise",
        num_ranks=n,
        num_chunks=n,
        moves=tuple(
            Move(shift - 1, rank, (rank + shift) % n, rank * n + (rank + shift) % n, "copy")
            for shift in range(1, n)
            for rank in range(n)
        ),
        before={(rank, rank * n + peer): 1 << rank for rank in range(n) for peer in range(n)},
        after={(rank, peer * n + rank): 1 << peer for rank in range(n) for peer in range(n)},
    )


def pipeline(num_ranks: int) -> Collective:
    """Send from rank 0 to rank 1, from there to rank 2, and so on."""
    return Collective(
        kind="pipeline",
        algorithm="chain",
        num_ranks=num_ranks,
        num_chunks=1,
        moves=tuple(Move(rank, rank, rank + 1, 0, "copy") for rank in range(num_ranks - 1)),
        before={(0, 0): 1},
        after={(rank, 0): 1 for rank in range(num_ranks)},
    )
