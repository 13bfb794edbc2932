"""What replicas shard: combinations of FSDP and ZeRO with the rest of a plan, and sizes of ZeRO's collectives."""

from __future__ import annotations

from stagewright.errors import UsageError
from stagewright.schedules.rules import SCHEDULES
from stagewright.spec.plan import Plan

_LARGEST = 8 << 20  # large enough to saturate a link
_SMALLEST = 1 << 16
_MOST_BUCKETS = 32


def bucket_bytes(parameter_bytes: int) -> int:
    """Return the size of a gradient bucket of a worker: a small part of its gradients, which ZeRO-2 does not hold."""
    return max(_SMALLEST, min(_LARGEST, parameter_bytes // _MOST_BUCKETS))


def check_fsdp(plan: Plan) -> None:
    """Raise UsageError if FSDP can't divide or gather parameters as the plan says."""
    _check_fsdp_shards(plan)
    if plan.fsdp_gather == "auto":
        return
    if not plan.shard:
        raise UsageError(
            f'fsdp_gather = "{plan.fsdp_gather}" says how often FSDP gathers parameters, and the plan has no shard '
            "(FSDP): leave it out, or use shard = true"
        )
    if plan.fsdp_gather == "step" and not plan.training:
        raise UsageError(
            'fsdp_gather = "step" keeps parameters gathered during a training step, and inference has none: leave it '
            "out, or leave out shard (FSDP), which gathers them for each micro-batch"
        )
    is_split = plan.training and plan.mesh.pipeline > 1 and SCHEDULES[plan.schedule].splits_backward
    if plan.fsdp_gather == "microbatch" and is_split:
        raise UsageError(
            f'schedule {plan.schedule!r} splits the backward, inside which fsdp_gather = "microbatch" gathers '
            'parameters: use fsdp_gather = "step", or schedule = "1f1b", "gpipe" or "interleaved"'
        )


def _check_fsdp_shards(plan: Plan) -> None:
    shards, data = plan.fsdp_shards, plan.mesh.data
    if shards is None:
        return
    if not plan.shard:
        raise UsageError(
            f"fsdp_shards = {shards} divides the replicas of FSDP into groups (HSDP), and the plan has no shard "
            "(FSDP): leave it out, or use shard = true"
        )
    if shards < 2 or data % shards:
        fits = [str(count) for count in range(2, data + 1) if data % count == 0]
        raise UsageError(
            f"fsdp_shards = {shards} does not divide data = {data} into groups of two or more replicas: "
            f"use {' or '.join(fits)}"
        )


def check_zero(plan: Plan) -> None:
    """Raise UsageError if ZeRO can't shard what replicas hold."""
    if plan.zero not in (0, 1, 2):
        fix = "use shard = true, which is ZeRO-3 (FSDP)" if plan.zero == 3 else "use 0, 1 or 2"
        raise UsageError(f"zero = {plan.zero} is not a ZeRO stage of replicas with all parameters: {fix}")
    if plan.zero and plan.shard:
        raise UsageError(f"shard (FSDP) is ZeRO-3, and the plan also has zero = {plan.zero}: use one of them")
    if plan.zero and plan.mesh.data == 1:
        raise UsageError(
            f"zero = {plan.zero} shards optimizer states over replicas, and there is only one: use a mesh with data=2 "
            "or more"
        )
    if plan.zero and plan.mesh.expert > 1:
        raise UsageError(
            f"zero = {plan.zero} shards what replicas hold in common, and expert = {plan.mesh.expert} divides experts "
            "over them: leave out one of the two"
        )
    if plan.zero and not plan.training:
        raise UsageError(f"zero = {plan.zero} is for training: leave it out, or use training = true")
