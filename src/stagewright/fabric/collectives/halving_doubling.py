"""All-reduce by recursive halving and doubling: 2·log2(n) steps instead of a ring's 2(n − 1).

    4 ranks, 4 chunks     step 0: 0↔2, 1↔3 exchange halves     0: 0 1|2 3   2: 0 1|2 3      (reduced)
                          step 1: 0↔1, 2↔3 exchange quarters   0: 0|1       1: 0|1          (reduced)
                          steps 2, 3: the reverse order                                     (copied)

If n is not a power of two, ranks from p, the largest power of two below n, first send their buffer to a partner, which
contributes for both, and receive the result at the end.
"""

from __future__ import annotations

from stagewright.fabric.collectives.collective import Collective, Move, all_reduce


def halving_doubling(num_ranks: int) -> Collective:
    """All-reduce in 2·log2(p) steps, two more where n is not a power of two."""
    p = 1 << (num_ranks.bit_length() - 1)
    extra = range(p, num_ranks)
    moves = [Move(0, rank, rank - p, chunk, "reduce") for rank in extra for chunk in range(p)]
    step = 1 if moves else 0
    halvings: list[list[Move]] = []
    ranges = dict.fromkeys(range(p), (0, p))
    distance = p // 2
    while distance:
        exchange = []
        for rank, (begin, end) in ranges.items():
            lower, upper = (begin, (begin + end) // 2), ((begin + end) // 2, end)
            ranges[rank], sent = (upper, lower) if rank & distance else (lower, upper)
            exchange += [Move(step, rank, rank ^ distance, chunk, "reduce") for chunk in range(*sent)]
        halvings.append(exchange)
        moves += exchange
        step += 1
        distance //= 2
    for exchange in reversed(halvings):
        # Each chunk returns from the rank that it was sent to.
        moves += [Move(step, move.destination, move.source, move.chunk, "copy") for move in exchange]
        step += 1
    moves += [Move(step, rank - p, rank, chunk, "copy") for rank in extra for chunk in range(p)]
    return all_reduce("halving-doubling", num_ranks, p, moves)
