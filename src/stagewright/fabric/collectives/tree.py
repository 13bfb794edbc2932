"""Tree algorithms: double binary tree all-reduce and binomial broadcast.

    tree of chunk 0, 6 ranks       3                tree of chunk 1: the same with ranks shifted by one,
                                1     5             so that inner ranks of one tree are leaves of the other
                               0 2   4

Partial sums move up, the result moves down; each tree carries half of the buffer. An engine that slices chunks uses
both directions at once.
"""

from __future__ import annotations

from stagewright.fabric.collectives.collective import Collective, Move, all_reduce


def double_tree(num_ranks: int) -> Collective:
    """All-reduce in about 4·log2(n) steps; no rank sends more than twice the buffer."""
    moves: list[Move] = []
    for chunk in range(2):
        parents = {(rank - chunk) % num_ranks: (parent - chunk) % num_ranks for rank, parent in _parents(num_ranks)}
        up, down = _depths(parents, num_ranks)
        last_up = max(up.values(), default=0)
        moves += [Move(up[child], child, parent, chunk, "reduce") for child, parent in parents.items()]
        moves += [Move(last_up + down[child], parent, child, chunk, "copy") for child, parent in parents.items()]
    return all_reduce("double-tree", num_ranks, 2, sorted(moves))


def broadcast(num_ranks: int) -> Collective:
    """Broadcast from rank 0 in log2(n) steps; in each step every rank that has the buffer sends it to one more."""
    moves = []
    step, num_holders = 0, 1
    while num_holders < num_ranks:
        moves += [
            Move(step, rank, rank + num_holders, 0, "copy") for rank in range(min(num_holders, num_ranks - num_holders))
        ]
        num_holders *= 2
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
    """Return (rank, parent) pairs of the in-order tree: counted from 1, trailing zero bits give a rank's height."""
    pairs = []
    root = 1 << (num_ranks.bit_length() - 1)
    for number in range(1, num_ranks + 1):
        if number == root:
            continue
        parent = _parent(number)
        while parent > num_ranks:  # only in a larger tree: use its parent instead
            parent = _parent(parent)
        pairs.append((number - 1, parent - 1))
    return pairs


def _parent(number: int) -> int:
    low = number & -number
    return (number ^ low) | (2 * low)


def _depths(parents: dict[int, int], num_ranks: int) -> tuple[dict[int, int], dict[int, int]]:
    """Return the step in which each rank sends up, and the one in which it receives the result."""
    height = dict.fromkeys(range(num_ranks), 0)
    depth: dict[int, int] = {}
    for rank in range(num_ranks):
        ancestor, steps = rank, 0
        while ancestor in parents:
            steps += 1
            ancestor = parents[ancestor]
            height[ancestor] = max(height[ancestor], steps)
        depth[rank] = steps
    return {rank: height[rank] for rank in parents}, {rank: depth[rank] for rank in parents}
