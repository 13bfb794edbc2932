"""Schedules of a pipeline in closed form: times of a rank, the bubble, and the micro-batches in flight; and what many
layouts have in common.

gpipe, 1f1b            every other rank delays the step by one micro-batch
interleaved,           by one of its v stages; with fewer micro-batches than ranks, each stage waits for the
looped-bfs             micro-batches to come round
zero bubble            weight gradients fill the drain
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from typing import Literal, TypeAlias

from stagewright.analytic.hardware.collectives import Network
from stagewright.analytic.hardware.kernels import Kernels
from stagewright.analytic.layout import Layout
from stagewright.analytic.operator import Operator
from stagewright.analytic.shape import Experts, TransformerShape
from stagewright.schedules.rules import SCHEDULES


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """Time of one micro-batch on one pipeline rank."""

    forward_s: float
    backward_s: float
    """With recomputation."""
    compute_s: float
    """Kernels alone."""
    recompute_s: float
    weight_s: float
    """Part of backward that computes weight gradients."""
    collective_s: float
    """Exposed tensor, context and expert collectives."""
    host_wait_s: float
    """How long the device waits for the host."""
    message_s: float
    """Exposed point-to-point messages of a micro-batch in the steady state."""
    hop_s: float
    """Messages to the next rank and back, while the pipeline fills and drains."""

    @property
    def total_s(self) -> float:
        """Time of a micro-batch in the steady state."""
        return self.forward_s + self.backward_s + self.message_s

    @property
    def fill_s(self) -> float:
        """Time by which the rank delays the pipeline's warm-up and drain."""
        return self.forward_s + self.backward_s + self.hop_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Device time, exposed collectives and host time of forward or backward."""

    device_s: float = 0.0
    collective_s: float = 0.0
    host_s: float = 0.0
    weight_s: float = 0.0
    """Part of device_s that computes weight gradients."""

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            device_s=self.device_s + other.device_s,
            collective_s=self.collective_s + other.collective_s,
            host_s=self.host_s + other.host_s,
            weight_s=self.weight_s + other.weight_s,
        )

    def times(self, count: float) -> Pass:
        return Pass(
            device_s=self.device_s * count,
            collective_s=self.collective_s * count,
            host_s=self.host_s * count,
            weight_s=self.weight_s * count,
        )

    def at_speed(self, speed: float) -> Pass:
        """Return the pass on a device that is so many times as fast."""
        return replace(self, device_s=self.device_s / speed, weight_s=self.weight_s / speed)

    @property
    def total_s(self) -> float:
        return max(self.device_s + self.collective_s, self.host_s)


Part: TypeAlias = Literal["dense", "experts", "embedding", "head"]

# What changes the time of a whole step or its memory, but no operator and no collective of a block.
APART = frozenset(
    {"schedule", "virtual", "zero", "shards", "gather_once", "recompute", "recompute_layers", "checkpoint_segments"}
    | {
        "layers",
        "message_share",
        "message_stall_s",
        "gradient_stall_s",
        "optimizer_states",
        "master_weights",
        "overlap_gradients",
    }
)
_BLOCK_FIELDS = attrgetter(*(name for name in Layout.__dataclass_fields__ if name not in APART))
_MAX_SHARED = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """Operators and passes of one block, embedding and head: many layouts have the same."""

    operators: dict[Part, tuple[Operator, ...]] = field(default_factory=dict)
    passes: dict[tuple[Part, bool], Pass] = field(default_factory=dict)
    """By part, and whether it is backward."""
    parameters: dict[tuple[int, int, bool, bool], tuple[float, float]] = field(default_factory=dict)
    """By number of blocks, of those with experts, and whether the rank has embedding and head."""


_shared: dict[tuple[object, ...], SharedParts] = {}


def shared_parts(shape: TransformerShape, layout: Layout, kernels: Kernels, network: Network) -> SharedParts:
    """Return what layouts that differ only in fields of `APART` have in common."""
    key = (shape, kernels.device, kernels.fused_attention, kernels.constants, network, _BLOCK_FIELDS(layout))
    if key not in _shared:
        if len(_shared) >= _MAX_SHARED:
            _shared.clear()
        _shared[key] = SharedParts()
    return _shared[key]


def bubble_s(layout: Layout, times: Sequence[RankTime], slowest: int) -> float:
    """Return how long the slowest rank waits in a step: warm-up, drain, and rounds with too few micro-batches."""
    splits = SCHEDULES[layout.schedule].splits_backward
    fills = [time.fill_s - (min(2 * time.weight_s, time.backward_s) if splits else 0.0) for time in times]
    ahead = (sum(fills) - fills[slowest]) / layout.virtual
    if layout.virtual == 1 or layout.microbatches >= layout.pipeline:
        return ahead
    # p · v + m − 1 stages of a micro-batch, instead of m · v + p − 1.
    return ahead + (layout.pipeline - layout.microbatches) * times[slowest].total_s * (1 - 1 / layout.virtual)


def in_flight(layout: Layout, rank: int) -> float:
    """Return the micro-batches whose activations a rank holds at once."""
    micro, ranks, virtual = layout.microbatches, layout.pipeline, layout.virtual
    if layout.schedule in ("gpipe", "looped-bfs"):
        return micro
    if layout.schedule in ("zbv", "dualpipev"):
        return min(micro, ranks + (0.5 if layout.schedule == "dualpipev" else 0.0))
    if virtual == 1:
        return min(micro, ranks - rank)
    chunks = min(micro * virtual, 2 * (ranks - rank - 1) + (virtual - 1) * ranks + 1)
    return chunks / virtual


@lru_cache(maxsize=1024)
def distinct_ranks(
    counts: tuple[int, ...],
    checkpointed: tuple[int, ...],
    experts: Experts | None,
    head_rank: int,
    speeds: tuple[float, ...],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return ranks whose times differ, and for each rank the index of the one that it equals.

    Args:
        counts: Blocks of each rank.
        checkpointed: Blocks of each rank that are recomputed.
        experts: Experts of the model, which not all blocks have; None: a dense model.
        head_rank: Rank with the head.
        speeds: Relative speed of each rank's devices; (): all alike.
    """
    seen: dict[tuple[int, int, int, int, float], tuple[int, int]] = {}
    like, before = [], 0
    for rank, blocks in enumerate(counts):
        moe = 0 if experts is None else experts.layers_before(before + blocks) - experts.layers_before(before)
        place = (rank == 0) + 2 * (rank == head_rank)
        kind = (blocks, moe, checkpointed[rank], place, speeds[rank] if speeds else 1.0)
        like.append(seen.setdefault(kind, (len(seen), rank))[0])
        before += blocks
    return tuple(rank for _, rank in seen.values()), tuple(like)


def block_counts(blocks: int, moe: int) -> tuple[tuple[Part, int], ...]:
    """Return how many blocks of each kind a rank has."""
    counts: tuple[tuple[Part, int], ...] = (("dense", blocks - moe), ("experts", moe))
    return tuple(pair for pair in counts if pair[1])
