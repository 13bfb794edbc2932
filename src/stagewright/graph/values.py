"""The plain values that capture gives: unit calls, crossings and cuts.

A *unit* is a submodule that is placed as a whole; a *unit call* is one use of it in a forward pass; a *cut* is a place
between two unit calls and its *crossing* is the set of tensors that must travel there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Crossing", "Cut", "UnitCall"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCall:
    """One call of one unit."""

    index: int
    """Place in the order of execution, from 0."""
    name: str
    """Unique name: the module's, with ``@2``, ``@3``, … for later calls of the same module."""
    target: str
    """Qualified name of the module in the user's model."""
    kind: str
    """Class name of the module."""
    block: str | None
    """Qualified name of the repeated block that this call is, or lies in; ``None`` for stem and head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """One tensor that must travel across a cut, at the example's batch size."""

    name: str
    """Name of the value in the graph."""
    shape: tuple[int, ...]
    """Shape at the example's batch size."""
    dtype: str
    """Element type, such as ``float32``."""
    item_bytes: int
    """Bytes of one element."""
    batch_dim: int | None
    """The dimension that grows with the batch, if one does."""

    @property
    def num_bytes(self) -> int:
        """Bytes on the link, sent contiguous."""
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A place between two unit calls."""

    index: int
    """Cut ``k`` lies after unit call ``k``."""
    after: str
    """Name of the unit call before the cut."""
    before: str
    """Name of the unit call behind the cut."""
    crossing: tuple[Crossing, ...]
    """What must travel here, each value once."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole crossing."""
        return sum(value.num_bytes for value in self.crossing)
