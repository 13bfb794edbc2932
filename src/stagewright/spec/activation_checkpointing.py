"""Block-wise activation checkpointing without a pipeline.

The engine checkpoints whole stages. A worker that holds the whole model therefore treats each block as one stage:

one stage:             saves the model's inputs; backward recomputes all activations at once
one stage per block:   saves each block's inputs; backward recomputes one block at a time
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stagewright.spec.plan import Plan


def checkpoint_by_block(plan: Plan, block_ends: Sequence[str]) -> Plan:
    """Cut the plan after each block except the last, if it recomputes without a pipeline."""
    # With several stages FSDP would reduce-scatter in each micro-batch.
    if plan.recompute == "none" or plan.mesh.pipeline > 1 or plan.shard or len(block_ends) < 2:
        return plan
    return replace(plan, cuts=tuple(block_ends[:-1]), schedule="interleaved")
