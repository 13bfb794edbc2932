"""The search space: every mesh × micro-batches × schedule × recomputation × FSDP × codec."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stagewright.errors import UsageError
from stagewright.planner.baseline import microbatch_counts
from stagewright.planner.costs.source import CostSource
from stagewright.schedules.rules import SCHEDULES
from stagewright.spec.plan import Mesh, Plan
from stagewright.spec.plan_rules import check_plan

_MAX_GRAPH_NODES = 40_000  # of a schedule without a wavefront
_WAVEFRONT_SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """The values to combine."""

    schedules: Sequence[str]
    recomputes: Sequence[str]
    shards: Sequence[bool]
    codecs: Sequence[str]
    max_tensor: int
    """Largest tensor parallel size."""


def enumerate_plans(base: Plan, source: CostSource, num_devices: int, space: SearchSpace) -> Iterator[tuple[Plan, str]]:
    """Yield every valid plan and its codec."""
    for mesh in _meshes(source, num_devices, space.max_tensor):
        if base.batch < mesh.data:
            continue
        options = itertools.product(
            microbatch_counts(-(-base.batch // mesh.data)),
            space.recomputes if base.training else ("none",),
            space.schedules if mesh.pipeline > 1 else ("1f1b",),
            space.shards if mesh.data > 1 and mesh.pipeline == 1 and base.training else (False,),
            space.codecs if mesh.pipeline > 1 else ("none",),
        )
        for microbatches, recompute, schedule, shard, codec in options:
            plan = replace(
                base,
                mesh=mesh,
                microbatches=microbatches,
                schedule=schedule,  # type: ignore[arg-type]
                recompute=recompute,  # type: ignore[arg-type]
                shard=shard,
                stages=None,
                cuts=(),
                placement="auto",
                devices=(),
                codec=codec,
            )
            if _is_valid(plan, source.num_units):
                yield plan, codec


def _meshes(source: CostSource, num_devices: int, max_tensor: int) -> Iterator[Mesh]:
    divisors = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    for tensor in source.tensor_sizes(min(num_devices, max_tensor)):
        if tensor not in divisors:
            continue
        for pipeline in divisors:
            if pipeline <= source.num_units and num_devices % (tensor * pipeline) == 0:
                yield Mesh(data=num_devices // (tensor * pipeline), tensor=tensor, pipeline=pipeline)


def _is_valid(plan: Plan, num_units: int) -> bool:
    if plan.num_stages > num_units or plan.batch < plan.microbatches * plan.mesh.data:
        return False
    if plan.recompute != "none" and SCHEDULES[plan.schedule].splits_backward:
        return False  # a recomputed stage runs its backward unsplit, so splitting gains nothing
    num_nodes = 4 * plan.num_stages * plan.microbatches
    if plan.schedule not in _WAVEFRONT_SCHEDULES and num_nodes > _MAX_GRAPH_NODES:
        return False
    try:
        check_plan(plan)
    except UsageError:
        return False
    return True
