"""Block-wise activation checkpointing without a pipeline.

The engine checkpoints whole stages. A worker that holds the whole model therefore treats each block as one stage:

one stage:             saves the model's inputs; backward recomputes all activations at once
one stage per block:   saves each block's inputs; backward recomputes one block at a time
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from stagewright.spec.plan import Plan


class _InBlock(Protocol):
    """A unit of a graph or a profile."""

    @property
    def name(self) -> str: ...
    @property
    def block(self) -> str | None: ...


def block_ends(units: Iterable[_InBlock]) -> list[str]:
    """Return the last unit of each block."""
    return list({unit.block: unit.name for unit in units if unit.block is not None}.values())


def checkpoints_by_block(plan: Plan) -> bool:
    """Whether a plan that names no cuts is cut after each block to recompute it."""
    # Recomputation of a block stops before its last all-reduce; forecasts of tensor parallelism would count it.
    return _is_recomputed_stage(plan) and plan.mesh.tensor == 1


def _is_recomputed_stage(plan: Plan) -> bool:
    # With several stages FSDP would reduce-scatter in each micro-batch.
    is_one_stage = plan.num_stages == 1 and plan.mesh.pipeline == 1 and not plan.shard
    return plan.training and plan.recompute in ("always", "except-last") and is_one_stage


def checkpoint_by_block(plan: Plan, ends: Sequence[str]) -> Plan:
    """Cut the plan after each block except the last, if it recomputes without a pipeline."""
    if not _is_recomputed_stage(plan) or len(ends) < 2:
        return plan
    return replace(plan, cuts=tuple(ends[:-1]), schedule="interleaved")
