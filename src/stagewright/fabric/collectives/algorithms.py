"""Collective algorithms by name, and bus bandwidth as nccl-tests defines it.

algbw = S / t.  busbw = algbw · f, which is comparable with the link rate for any number of ranks: f = 2(n − 1)/n for
all-reduce; (n − 1)/n for reduce-scatter, all-gather and all-to-all, with S the total; 1 for broadcast and send.
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

MAX_RANKS = 256  # all-to-all has n² moves

ALL_REDUCE: dict[str, Callable[[int], Collective]] = {
    "ring": ring,
    "bidirectional-ring": bidirectional_ring,
    "halving-doubling": halving_doubling,
    "double-tree": double_tree,
}
# All names that users can choose: the all-reduce algorithms and the other collectives.
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
    """Return an algorithm's moves for ``num_ranks`` ranks."""
    if name not in ALGORITHMS:
        raise UnknownName("algorithm", name, ALGORITHMS)
    if not 1 <= num_ranks <= MAX_RANKS:
        raise UsageError(f"a collective cannot have {num_ranks} ranks; use 1 to {MAX_RANKS}")
    return ALGORITHMS[name](num_ranks)


def bus_factor(kind: Kind, num_ranks: int) -> float:
    """Return busbw / algbw."""
    n = num_ranks
    if kind == "all-reduce":
        return 2 * (n - 1) / n
    return (n - 1) / n if kind in ("reduce-scatter", "all-gather", "all-to-all") else 1.0
