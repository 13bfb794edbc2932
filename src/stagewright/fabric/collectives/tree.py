"""Trees: the double binary tree all-reduce and the binomial broadcast.

    tree of chunk 0, 6 ranks       3                tree of chunk 1: the same with every rank one further,
                                1     5             so that who works inside one tree is a leaf of the other
                               0 2   4

Sums go up, the result comes down; each tree carries half of the buffer. An engine that cuts chunks into slices has both
directions busy at once.
"""

from __future__ import annotations

from stagewright.fabric.collectives.collective import Collective, Move

__all__ = ["broadcast", "double_tree"]


def double_tree(num_ranks: int) -> Collective:
    """All-reduce: about 4·log2(n) steps; no rank sends more than twice the buffer."""
    moves: list[Move] = []
    for chunk in range(2):
        parents = {(rank - chunk) % num_ranks: (parent - chunk) % num_ranks for rank, parent in _parents(num_ranks)}
        up, down = _depths(parents, num_ranks)
        last_up = max(up.values(), default=0)
        moves += [Move(up[child], child, parent, chunk, "reduce") for child, parent in parents.items()]
        moves += [Move(last_up + down[child], parent, child, chunk, "copy") for child, parent in parents.items()]
    places = [(rank, chunk) for rank in range(num_ranks) for chunk in range(2)]
    return Collective(
        kind="all-reduce",
        algorithm="double-tree",
        num_ranks=num_ranks,
        num_chunks=2,
        moves=tuple(sorted(moves)),
        before={(rank, chunk): 1 << rank for rank, chunk in places},
        after=dict.fromkeys(places, (1 << num_ranks) - 1),
    )


def broadcast(num_ranks: int) -> Collective:
    """From rank 0 to all: in each step everybody who has it gives it to one more; log2(n) steps."""
    moves = []
    step, have = 0, 1
    while have < num_ranks:
        moves += [Move(step, rank, rank + have, 0, "copy") for rank in range(min(have, num_ranks - have))]
        have *= 2
        step += 1
    return Collective(
        kind="broadcast",
        algorithm="binomial-tree",
        num_ranks=num_ranks,
        num_chunks=1,
        moves=tuple(moves),
        before={(0, 0): 1},
        after={(rank, 0): 1 for rank in range(num_ranks)},
    )


def _parents(num_ranks: int) -> list[tuple[int, int]]:
    """(rank, its parent) in the in-order tree: counted from 1, a number's last zeros say how high it stands."""
    found = []
    root = 1 << (num_ranks.bit_length() - 1)
    for number in range(1, num_ranks + 1):
        if number == root:
            continue
        parent = _above(number)
        while parent > num_ranks:  # it would exist in a larger tree; its own parent takes its place
            parent = _above(parent)
        found.append((number - 1, parent - 1))
    return found


def _above(number: int) -> int:
    low = number & -number
    return (number ^ low) | (2 * low)


def _depths(parents: dict[int, int], num_ranks: int) -> tuple[dict[int, int], dict[int, int]]:
    """The step in which each rank sends up, and that in which the result comes down to it."""
    height = dict.fromkeys(range(num_ranks), 0)
    depth: dict[int, int] = {}
    for rank in range(num_ranks):
        at, steps = rank, 0
        while at in parents:
            steps += 1
            at = parents[at]
            height[at] = max(height[at], steps)
        depth[rank] = steps
    return {rank: height[rank] for rank in parents}, {rank: depth[rank] for rank in parents}
