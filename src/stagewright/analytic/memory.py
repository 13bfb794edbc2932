"""Memory of each pipeline rank, by what holds it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stagewright.analytic.layout import Layout
from stagewright.analytic.operator import Operator
from stagewright.analytic.shape import TransformerShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Peak memory of one pipeline rank."""

    rank: int
    """Pipeline rank."""
    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    """Optimizer states and 32-bit copies of the parameters."""
    activations_bytes: float
    """Saved activations of all micro-batches in flight."""
    logits_bytes: float
    """Logits and their gradient, on the rank that holds the head."""
    temporary_bytes: float
    """Largest tensors of the running operator."""
    base_bytes: float
    """Workspaces and communicators."""
    microbatches: float = 1.0
    """Micro-batches in flight at the peak."""

    @property
    def peak_bytes(self) -> int:
        return round(
            self.parameters_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.logits_bytes
            + self.temporary_bytes
            + self.base_bytes
        )

    @property
    def largest(self) -> str:
        """What holds the most."""
        sizes = {name: value for name, value in asdict(self).items() if name.endswith("_bytes")}
        return max(sizes, key=lambda name: sizes[name]).removesuffix("_bytes")

    @property
    def when(self) -> str:
        """When the peak is: at a loss where the rank has the head, else when a backward begins."""
        moment = "at the loss" if self.logits_bytes else "as backward begins"
        return f"{moment}, {self.microbatches:.3g} in flight"

    def holding(self, rank: int, microbatches: float, ahead_bytes: float = 0.0) -> RankMemory:
        """Return the memory of a rank that is like this one, with so many micro-batches in flight instead of one.

        Args:
            rank: Pipeline rank.
            microbatches: Micro-batches in flight.
            ahead_bytes: Tensors that stay allocated because the host is ahead of the device.
        """
        return RankMemory(
            rank=rank,
            parameters_bytes=self.parameters_bytes,
            gradients_bytes=self.gradients_bytes,
            optimizer_bytes=self.optimizer_bytes,
            activations_bytes=microbatches * self.activations_bytes,
            logits_bytes=self.logits_bytes,
            temporary_bytes=self.temporary_bytes + ahead_bytes,
            base_bytes=self.base_bytes,
            microbatches=microbatches,
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "peak_bytes": self.peak_bytes, "largest": self.largest, "when": self.when}


def rank_parameters(shape: TransformerShape, layout: Layout, rank: int, blocks: int) -> tuple[float, float]:
    """Return the parameters of a rank: those that data ranks replicate, and those of routed experts."""
    first, last = rank == 0, rank == layout.head_rank
    tensor = layout.tensor
    moe = moe_blocks(shape, layout, rank)
    dense = blocks - moe
    parameters = (
        blocks * (shape.attention_parameters / tensor + 2 * shape.width) + dense * shape.dense_parameters / tensor
    )
    routed = 0.0
    if shape.experts is not None:
        routed = moe * shape.experts.num_experts * shape.expert_parameters / layout.expert
        parameters += moe * shape.shared_parameters / tensor
    table = shape.vocabulary * shape.width / (tensor if layout.divided_vocabulary else 1)
    if first:
        parameters += table
        if not shape.rotary:
            parameters += shape.sequence_length * shape.width
    if last:
        parameters += shape.width
        if not shape.tied or not first:
            parameters += table
    return parameters, routed


def moe_blocks(shape: TransformerShape, layout: Layout, rank: int) -> int:
    """Return how many blocks of a rank have experts."""
    if shape.experts is None:
        return 0
    counts = layout.blocks(shape.num_layers)
    before = sum(counts[:rank])
    return shape.experts.layers_before(before + counts[rank]) - shape.experts.layers_before(before)


def block_saved_bytes(operators: tuple[Operator, ...], shape: TransformerShape, layout: Layout, *, full: bool) -> float:
    """Return the activations that one block saves for one micro-batch."""
    if full:
        tokens = layout.end_tokens(shape.sequence_length)  # its input
        share = layout.tensor if layout.sequence_parallel else 1
        return tokens * shape.width * layout.item_bytes / share
    skip = layout.recompute == "selective"
    return sum(operator.saved_bytes for operator in operators if not (skip and operator.selective))


def ahead_bytes(shape: TransformerShape, layout: Layout, rank: int, blocks_ahead: float) -> float:
    """Return the gathered inputs that stay allocated because the host enqueues forward passes ahead of the device.

    Sequence parallelism gathers the input of two linear layers of a block and frees it after use. A tensor that two
    streams used is reusable only when the device is done with it, so a pass that is enqueued ahead holds all of them:
    one forward pass without a pipeline, the warm-up's but the last with one. The launch queue bounds how far the host
    gets. Stalled messages let the device catch up.
    """
    if layout.tensor == 1 or not (layout.sequence_parallel and layout.regather) or layout.message_stall_s:
        return 0.0
    passes = 1 if layout.pipeline == 1 else min(layout.microbatches, max(0, layout.pipeline - rank - 2))
    blocks = min(passes * layout.blocks(shape.num_layers)[rank], blocks_ahead)
    tokens = layout.rank_tokens(shape.sequence_length)
    return 2 * blocks * tokens * shape.width * layout.item_bytes * (1 - 1 / layout.tensor)
