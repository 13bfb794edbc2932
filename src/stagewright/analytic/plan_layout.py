"""The layout of a plan that the engine here runs."""

from __future__ import annotations

import heapq
import math
import re
from functools import lru_cache
from typing import Any

from stagewright.analytic.layout import Layout, LayoutAxis
from stagewright.codecs.registry import get
from stagewright.errors import UsageError
from stagewright.schedules.action_order import SEARCHED
from stagewright.spec.activation_checkpointing import checkpoints_by_block, describe_offload
from stagewright.spec.optimizers import OPTIMIZERS
from stagewright.spec.plan import Plan

# Ranks are numbered with the pipeline axis innermost; `--innermost tensor` asks for the other order.
_ORDERS: dict[str, tuple[LayoutAxis, ...]] = {
    "pipeline": ("pipeline", "tensor", "context", "data"),
    "tensor": ("tensor", "pipeline", "context", "data"),
    "data": ("data", "tensor", "context", "pipeline"),
}
_BLOCK = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def layout_of(plan: Plan, num_layers: int, innermost: str = "pipeline") -> Layout:
    """Return the layout of a plan; its blocks on each rank are empty if the plan leaves the cuts to the engine."""
    if not plan.training:
        raise UsageError("an analytic forecast is of a training step, but the plan has training = false")
    mesh = plan.mesh
    if mesh.tensor_degrees:
        raise UsageError(
            f"an analytic forecast knows one tensor degree for all stages, not {mesh}: forecast it without --analytic, "
            f"or use tensor = {mesh.tensor}"
        )
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
    layers = _blocks_of_cuts(plan, num_layers) if plan.cuts and mesh.pipeline > 1 else ()
    return Layout(
        data=mesh.data,
        tensor=mesh.tensor,
        expert=mesh.expert,
        context=mesh.context,
        context_attention=plan.context_attention,
        pipeline=mesh.pipeline,
        virtual=stages if mesh.pipeline > 1 else 1,
        microbatch=max(1, math.ceil(plan.batch / (mesh.data * plan.microbatches))),
        microbatches=plan.microbatches,
        zero=3 if plan.shard else plan.zero,
        shards=plan.fsdp_shards,
        gather_once=plan.gathers_once,
        **_recomputation(plan, num_layers, layers, stages),
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
        layers=layers,
        stack="stagewright",
    )


def _recomputation(plan: Plan, num_layers: int, layers: tuple[int, ...], stages: int) -> dict[str, Any]:
    """Return what a plan recomputes, as fields of a layout: whole stages, blocks one at a time, or attention alone.

    Args:
        plan: The plan.
        num_layers: Blocks of the model.
        layers: Blocks of each pipeline rank; (): the plan leaves the cuts to the engine.
        stages: Stages of each pipeline rank.
    """
    ranks = plan.mesh.pipeline
    blocks = layers or Layout(pipeline=ranks).blocks(num_layers)
    if plan.recompute == "none" or plan.recompute == ():
        return {}
    if plan.recompute == "attention" or (plan.attention_units and not plan.recomputed_units):
        return {"recompute": "selective"}
    if plan.recomputed_units:
        found = (_BLOCK.search(name) for name in plan.recomputed_units)
        chosen = {int(match[1]) for match in found if match}
        ends = [sum(blocks[: rank + 1]) for rank in range(ranks)]
        counts = tuple(
            sum(end - count <= block < end for block in chosen) for end, count in zip(ends, blocks, strict=True)
        )
        return {"recompute": "full", "recompute_layers": counts}
    # A stage is recomputed as a whole. Without cuts and pipeline, each block is a stage.
    by_block = checkpoints_by_block(plan)
    if plan.recompute == "always":
        return {"recompute": "full", "checkpoint_segments": None if by_block else stages}
    if by_block:  # all but the last
        return {"recompute": "full", "recompute_layers": num_layers - 1}
    flags = plan.recompute
    if isinstance(flags, str):
        flags = (True,) * (plan.num_stages - 1) + (False,)
    workers = plan.stage_workers
    repeated = [
        sum(bool(flag) for flag, worker in zip(flags, workers, strict=True) if worker == rank) for rank in range(ranks)
    ]
    if not any(repeated):
        return {}
    return {
        "recompute": "full",
        "recompute_layers": tuple(
            num_layers if count == stages else round(own * count / stages)
            for own, count in zip(blocks, repeated, strict=True)
        ),
        "checkpoint_segments": max(repeated),
    }


@lru_cache(maxsize=256)
def balance(
    num_layers: int, speeds: tuple[float, ...], block_s: float, first_s: float, head_s: float, head_rank: int
) -> tuple[int, ...]:
    """Divide blocks so that the slowest rank is as fast as possible; the ranks with embedding and head have more to do.

    >>> balance(8, (1.0, 1.0, 1.0, 1.0), 1.0, 0.0, 1.5, 3)
    (3, 2, 2, 1)
    >>> balance(8, (3.0, 1.0), 1.0, 0.0, 0.0, 1)
    (6, 2)
    """
    ends = dict.fromkeys(range(len(speeds)), block_s)  # of the next block, at full speed
    ends[0] += first_s
    ends[head_rank] += head_s
    heap = [(seconds / speeds[rank], rank) for rank, seconds in ends.items()]
    heapq.heapify(heap)
    counts = [0] * len(speeds)
    for _ in range(num_layers):
        end, rank = heap[0]
        counts[rank] += 1
        heapq.heapreplace(heap, (end + block_s / speeds[rank], rank))
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
