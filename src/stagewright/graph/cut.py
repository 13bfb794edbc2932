"""Unit calls, cuts and crossings: the plain values of a captured model.

A *unit* is a submodule that is placed as a whole; a *unit call* is one call of it in a forward pass; a *cut* is a
position between two unit calls, and its *crossing* is the set of tensors that must be sent there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCall:
    """One call of one unit."""

    index: int
    """Position in the order of execution, from 0."""
    name: str
    """Unique name: that of the module, with ``@2``, ``@3``, … for later calls of the same module."""
    target: str
    """Qualified name of the module in the user's model."""
    kind: str
    """Class name of the module."""
    block: str | None
    """Qualified name of the repeated block that this call is, or is part of; ``None`` for stem and head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """One tensor that must be sent across a cut, at the example's batch size."""

    name: str
    """Name of the value in the graph."""
    shape: tuple[int, ...]
    dtype: str
    """Element type, such as ``float32``."""
    item_bytes: int
    """Bytes of one element."""
    batch_dim: int | None
    """The dimension that grows with the batch, if any."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the contiguous tensor."""
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A position between two unit calls."""

    index: int
    """Cut ``k`` is after unit call ``k``."""
    after: str
    """Name of the unit call before the cut."""
    before: str
    """Name of the unit call behind the cut."""
    crossing: tuple[Crossing, ...]
    """The tensors that must be sent here, each once."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all crossing tensors."""
        return sum(tensor.num_bytes for tensor in self.crossing)
