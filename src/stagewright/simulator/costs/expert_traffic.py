"""Experts in one unit: what expert parallelism divides, and the rows that its all-to-alls exchange."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTraffic:
    """Mixture-of-experts layers of one unit, for one micro-batch of the profiled size."""

    num_experts: int = 0
    """Experts of each layer, or their greatest common divisor."""
    parameter_bytes: int = 0
    """Parameters of its experts, which are divided over the expert axis."""
    row_bytes: tuple[int, ...] = ()
    """For each layer, one row of hidden states for each token and chosen expert: dispatch and combine exchange them in
    forward, and their gradients in backward. With balanced experts, all but 1/n of them go to other workers."""
