"""All-reduce by recursive halving and doubling: 2·log2(n) steps instead of a ring's 2(n − 1).

    4 ranks, 4 chunks     step 0: 0↔2, 1↔3 exchange halves     0: 0 1|2 3   2: 0 1|2 3      (reduced)
                          step 1: 0↔1, 2↔3 exchange quarters   0: 0|1       1: 0|1          (reduced)
                          steps 2, 3: the reverse order                                     (copied)

If n is not a power of two, ranks from p, the largest power of two below n, first send their buffer to a partner, which
contributes for both, and receive the result at the end.
"""

from __future__ import annotations

from stagewright.fabric.collectives.collective import Collective, Move


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
        for rank in range(p):
            begin, end = ranges[rank]
            middle = (begin + end) // 2
            upper = bool(rank & distance)
            sent = range(begin, middle) if upper else range(middle, end)
            exchange += [Move(step, rank, rank ^ distance, chunk, "reduce") for chunk in sent]
        ranges = {
            rank: ((begin + end) // 2, end) if rank & distance else (begin, (begin + end) // 2)
            for rank, (begin, end) in ranges.items()
        }
        halvings.append(exchange)
        moves += exchange
        step += 1
        distance //= 2
    for exchange in reversed(halvings):
        # Each chunk returns from the rank that it was sent to.
        moves += [Move(step, move.destination, move.source, move.chunk, "copy") for move in exchange]
        step += 1
    moves += [Move(step, rank - p, rank, chunk, "copy") for rank in extra for chunk in range(p)]
    places = [(rank, chunk) for rank in range(num_ranks) for chunk in range(p)]
    return Collective(
        kind="all-reduce",
        algorithm="halving-doubling",
        num_ranks=num_ranks,
        num_chunks=p,
        moves=tuple(moves),
        before={(rank, chunk): 1 << rank for rank, chunk in places},
        after=dict.fromkeys(places, (1 << num_ranks) - 1),
    )
