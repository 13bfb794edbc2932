"""Collectives that only move data: all-to-all, and a pipeline's sends from each rank to the next."""

from __future__ import annotations

from stagewright.fabric.collectives.collective import Collective, Move

__all__ = ["all_to_all", "pipeline"]


def all_to_all(num_ranks: int) -> Collective:
    """Rank i has a chunk for every rank j; in step s everybody sends to the rank s + 1 further on."""
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
        before={(rank, rank * n + other): 1 << rank for rank in range(n) for other in range(n)},
        after={(rank, other * n + rank): 1 << other for rank in range(n) for other in range(n)},
    )


def pipeline(num_ranks: int) -> Collective:
    """Rank 0 sends to rank 1, which sends to rank 2, and so on to the last."""
    return Collective(
        kind="pipeline",
        algorithm="chain",
        num_ranks=num_ranks,
        num_chunks=1,
        moves=tuple(Move(rank, rank, rank + 1, 0, "copy") for rank in range(num_ranks - 1)),
        before={(0, 0): 1},
        after={(rank, 0): 1 for rank in range(num_ranks)},
    )
