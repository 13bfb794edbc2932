"""A stage is what is recomputed, so a worker that holds the whole model takes it as one stage a block to recompute.

one stage:           keeps its inputs; in the backward everything is there again
one stage a block:   keeps what enters each block; in the backward one block at a time is there again
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stagewright.spec.plan import Plan

__all__ = ["recomputed_by_blocks"]


def recomputed_by_blocks(plan: Plan, blocks: Sequence[str]) -> Plan:
    """The plan, cut after each block but the last where it recomputes without a pipeline; `blocks` are their ends."""
    # The engine shards replicas of one stage alone.
    if plan.recompute == "none" or plan.mesh.pipeline > 1 or plan.shard or len(blocks) < 2:
        return plan
    return replace(plan, cuts=tuple(blocks[:-1]), schedule="interleaved")
