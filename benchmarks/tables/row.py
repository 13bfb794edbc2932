"""One measured run."""

from __future__ import annotations

from dataclasses import dataclass

from stagewright.analytic.layout import Layout
from stagewright.analytic.shape import TransformerShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured step: what ran where, and what it took."""

    table: str
    name: str
    shape: TransformerShape
    layout: Layout
    cluster: str
    step_s: float
    memory_bytes: float | None = None
    group: str = ""
    """Rows among which a planner chooses: same model, devices and batch."""
    fitted: bool = False
    """Whether constants were fitted on this row: then it is no test."""
