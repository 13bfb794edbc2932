"""Collectives of tensor parallelism in one unit, and in a stage of units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTraffic:
    """Collectives of one unit whose sequence is divided, for one micro-batch of the profiled size.

    Backward has the transposes: a reduce-scatter for each all-gather before a region, and the reverse.
    """

    gathered_bytes: tuple[int, ...] = ()
    """Bytes of each all-gather before a region, in forward."""
    replicated_bytes: tuple[int, ...] = ()
    """Bytes of each all-gather before a region that begins with replicated layers, in forward; backward has none."""
    scattered_bytes: tuple[int, ...] = ()
    """Bytes of each reduce-scatter after a region, in forward."""
    joined_bytes: tuple[int, ...] = ()
    """Bytes of each all-gather at the end of a block, in forward."""
    divided_bytes: tuple[int, ...] = ()
    """Bytes of each all-gather at the start of a block, in backward."""
    continues: bool = False
    """Whether the unit passes its shard on to the next one, which needs neither of these two if both are in a stage."""
    partial_bytes: int = 0
    """Parameters whose gradients are all-reduced once per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTraffic:
    """Collectives of one unit along the tensor axis, for one micro-batch of the profiled size."""

    forward_bytes: tuple[int, ...] = ()
    """Bytes of each all-reduce in forward."""
    backward_bytes: tuple[int, ...] = ()
    """Bytes of each all-reduce in backward."""
    gathered_bytes: tuple[int, ...] = ()
    """Bytes of each all-gather in forward: logits of a divided vocabulary that are needed whole."""
    loss_bytes: tuple[int, ...] = ()
    """Bytes of each all-reduce of a loss after the last unit, which no recomputation repeats."""
    sequence: SequenceTraffic = field(default_factory=SequenceTraffic)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSequenceTraffic:
    """Collectives of a stage with divided sequences; sizes are those of whole tensors."""

    forward_gathered_bytes: tuple[int, ...] = ()
    forward_scattered_bytes: tuple[int, ...] = ()
    backward_gathered_bytes: tuple[int, ...] = ()
    backward_scattered_bytes: tuple[int, ...] = ()
    partial_bytes: int = 0
    """Parameters whose gradients are all-reduced once per step."""

    @property
    def forward_bytes(self) -> tuple[int, ...]:
        """All-gathers and reduce-scatters in forward, which send the same."""
        return (*self.forward_gathered_bytes, *self.forward_scattered_bytes)

    @property
    def backward_bytes(self) -> tuple[int, ...]:
        """All-gathers and reduce-scatters in backward."""
        return (*self.backward_gathered_bytes, *self.backward_scattered_bytes)


def stage_sequence_traffic(units: Sequence[TensorTraffic]) -> StageSequenceTraffic:
    """Add up the units of a stage; between two units of which one continues the other, nothing is joined."""
    gathered: list[int] = []
    replicated: list[int] = []
    scattered: list[int] = []
    joined: list[int] = []
    divided: list[int] = []
    for index, unit in enumerate(units):
        traffic = unit.sequence
        gathered += traffic.gathered_bytes
        replicated += traffic.replicated_bytes
        scattered += traffic.scattered_bytes
        joined += () if traffic.continues and index + 1 < len(units) else traffic.joined_bytes
        divided += () if index and units[index - 1].sequence.continues else traffic.divided_bytes
    return StageSequenceTraffic(
        forward_gathered_bytes=(*gathered, *replicated, *joined),
        forward_scattered_bytes=tuple(scattered),
        backward_gathered_bytes=(*scattered, *divided),
        backward_scattered_bytes=tuple(gathered),
        partial_bytes=sum(unit.sequence.partial_bytes for unit in units),
    )
