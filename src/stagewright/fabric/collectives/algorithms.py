"""The collectives by name, and nccl-tests' definitions of bandwidth.

algbw = S / t.  busbw = algbw · f, which compares with a link's rate whatever the number of ranks: all-reduce
f = 2(n − 1)/n; reduce-scatter, all-gather and all-to-all (n − 1)/n with S the total; broadcast and send 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from stagewright.errors import UnknownName, UsageError
from stagewright.fabric.collectives.collective import Collective, Kind
from stagewright.fabric.collectives.exchange import all_to_all, pipeline
from stagewright.fabric.collectives.halving_doubling import halving_doubling
from stagewright.fabric.collectives.ring import all_gather, bidirectional_ring, reduce_scatter, ring
from stagewright.fabric.collectives.tree import broadcast, double_tree

__all__ = ["ALGORITHMS", "ALL_REDUCE", "MOST_RANKS", "bus_factor", "collective"]

MOST_RANKS = 256  # the moves of all-to-all grow with the square

ALL_REDUCE: dict[str, Callable[[int], Collective]] = {
    "ring": ring,
    "bidirectional-ring": bidirectional_ring,
    "halving-doubling": halving_doubling,
    "double-tree": double_tree,
}
# Everything that may be typed: the ways of an all-reduce, and the other collectives.
ALGORITHMS: dict[str, Callable[[int], Collective]] = {
    **ALL_REDUCE,
    "reduce-scatter": reduce_scatter,
    "all-gather": all_gather,
    "all-to-all": all_to_all,
    "broadcast": broadcast,
    "pipeline": pipeline,
}


@cache
def collective(name: str, num_ranks: int) -> Collective:
    """The moves of a named algorithm for that many ranks."""
    if name not in ALGORITHMS:
        raise UnknownName("algorithm", name, ALGORITHMS)
    if not 1 <= num_ranks <= MOST_RANKS:
        raise UsageError(f"a collective of {num_ranks} ranks can't be made: use 1 to {MOST_RANKS}")
    return ALGORITHMS[name](num_ranks)


def bus_factor(kind: Kind, num_ranks: int) -> float:
    """busbw / algbw."""
    n = num_ranks
    if kind == "all-reduce":
        return 2 * (n - 1) / n
    return (n - 1) / n if kind in ("reduce-scatter", "all-gather", "all-to-all") else 1.0
