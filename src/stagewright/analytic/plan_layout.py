"""The layout of a plan that the engine here runs."""

from __future__ import annotations

import heapq
import math
import re
from functools import lru_cache

from stagewright.analytic.layout import Layout, LayoutAxis, RecomputeMode
from stagewright.codecs.registry import get
from stagewright.errors import UsageError
from stagewright.schedules.action_order import SEARCHED
from stagewright.spec.activation_checkpointing import describe_offload
from stagewright.spec.optimizers import OPTIMIZERS
from stagewright.spec.plan import Plan

# Ranks are numbered with the pipeline axis innermost; `--innermost tensor` asks for the other order.
_ORDERS: dict[str, tuple[LayoutAxis, ...]] = {
    "pipeline": ("pipeline", "tensor", "context", "data"),
    "tensor": ("tensor", "pipeline", "context", "data"),
    "data": ("data", "tensor", "context", "pipeline"),
}
_LAYOUT_MODES: dict[str, RecomputeMode] = {"none": "none", "attention": "selective"}
_BLOCK = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def layout_of(plan: Plan, num_layers: int, innermost: str = "pipeline") -> Layout:
    """Return the layout of a plan; its blocks on each rank are empty if the plan leaves the cuts to the engine."""
    if not plan.training:
        raise UsageError("an analytic forecast is of a training step, but the plan has training = false")
    mesh = plan.mesh
    if plan.schedule == SEARCHED and mesh.pipeline > 1:
        raise UsageError(
            'schedule = "searched" is ordered for measured times, and an analytic forecast has none: forecast it '
            'without --analytic, or use another schedule, like "zbv"'
        )
    if plan.offload != "none" and plan.offload:
        raise UsageError(
            f"an analytic forecast knows no offload, and the plan has offload = {describe_offload(plan)}: forecast it "
            "without --analytic, or leave it out"
        )
    optimizer = OPTIMIZERS[plan.optimizer.name]
    stages = max(1, plan.num_stages // mesh.pipeline)
    return Layout(
        data=mesh.data,
        tensor=mesh.tensor,
        expert=mesh.expert,
        context=mesh.context,
        pipeline=mesh.pipeline,
        virtual=stages if mesh.pipeline > 1 else 1,
        microbatch=max(1, math.ceil(plan.batch / (mesh.data * plan.microbatches))),
        microbatches=plan.microbatches,
        zero=3 if plan.shard else plan.zero,
        shards=plan.fsdp_shards,
        gather_once=plan.gathers_once,
        recompute=_LAYOUT_MODES.get(plan.recompute, "full") if isinstance(plan.recompute, str) else "full",
        # A stage is recomputed as a whole.
        checkpoint_segments=stages,
        precision=plan.compute_dtype,
        # Autocast keeps 32-bit parameters and gradients, and caches 16-bit copies of the parameters.
        master_weights=plan.autocast_dtype is not None,
        gradient_bytes=2 if plan.dtype == "bfloat16" else 4,
        optimizer_states=optimizer.num_states + (1 if plan.optimizer.momentum else 0),
        divided_vocabulary=plan.vocab_parallel,
        sequence_parallel=plan.sequence_parallel,
        regather=not plan.sequence_parallel,  # gathered inputs are saved
        schedule=plan.schedule if mesh.pipeline > 1 else "1f1b",
        message_share=_message_share(plan.codec_of(0), plan.compute_dtype) if plan.num_stages > 1 else 1.0,
        order=_ORDERS[innermost],
        layers=_blocks_of_cuts(plan, num_layers) if plan.cuts and mesh.pipeline > 1 else (),
        stack="stagewright",
    )


@lru_cache(maxsize=256)
def balance(
    num_layers: int, ranks: int, block_s: float, first_s: float, head_s: float, head_rank: int
) -> tuple[int, ...]:
    """Divide blocks so that the slowest rank is as fast as possible; the ranks with embedding and head have more to do.

    >>> balance(8, 4, 1.0, 0.0, 1.5, 3)
    (3, 2, 2, 1)
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    for rank, seconds in ((0, first_s), (head_rank, head_s)):
        loads[rank] = (loads[rank][0] + seconds, rank)
    heapq.heapify(loads)
    counts = [0] * ranks
    for _ in range(num_layers):
        load, rank = loads[0]
        counts[rank] += 1
        heapq.heapreplace(loads, (load + block_s, rank))
    return tuple(counts)


@lru_cache(maxsize=64)
def _message_share(codec: str, dtype: str) -> float:
    """Return the bytes that a codec sends over those of the tensor."""
    if codec in ("none", "auto"):
        return 1.0
    import torch

    shape, torch_dtype = (1 << 10, 1 << 6), getattr(torch, dtype)
    return float(get(codec).num_bytes(shape, torch_dtype) / (math.prod(shape) * torch_dtype.itemsize))


def _blocks_of_cuts(plan: Plan, num_layers: int) -> tuple[int, ...]:
    """Return the blocks of each rank, from the numbers in the names of the units before the cuts."""
    ends: list[int] = []
    for name in plan.cuts:
        found = _BLOCK.search(name)
        # A cut after a unit without a number is after the embedding or after the last block.
        ends.append(int(found[1]) + 1 if found else (0 if not ends else num_layers))
    counts = [0] * plan.mesh.pipeline
    previous = 0
    for end, rank in zip([*ends, num_layers], plan.stage_workers, strict=True):
        if not previous <= end <= num_layers:
            raise UsageError(
                f"the cuts {', '.join(plan.cuts)} do not follow the {num_layers} blocks of the model in order; leave "
                "them out, or give the model of the plan"
            )
        counts[rank] += end - previous
        previous = end
    return tuple(counts)
