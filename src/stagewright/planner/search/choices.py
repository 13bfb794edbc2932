"""The search space: every mesh × micro-batches × schedule × recomputation × FSDP or ZeRO × codec."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from stagewright.errors import UsageError
from stagewright.planner.baseline import microbatch_counts
from stagewright.schedules.rules import SCHEDULES
from stagewright.spec.plan import Mesh, Plan
from stagewright.spec.plan_rules import FSDP_GATHERS, check_choices, check_combination
from stagewright.spec.searched_order import lacks_order, layouts

_WAVEFRONT_SCHEDULES = ("1f1b", "gpipe")
_MAX_UNLIKE_STAGES = 8  # pipeline workers, one of which has another tensor degree
_MAX_SEARCHED_PAIRS = 1024  # stages × micro-batches of a step whose order is searched


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """The values to combine."""

    schedules: Sequence[str]
    recomputes: Sequence[str]
    shards: Sequence[bool]
    """Whether replicas use FSDP."""
    zeros: Sequence[int]
    """ZeRO stages of replicas without FSDP."""
    codecs: Sequence[str]
    with_divisions: bool = False
    """Whether tensor parallel plans divide the vocabulary and the sequence, whatever the base plan does."""
    devices_per_host: int | None = None
    """Devices of the smallest of several hosts, inside which HSDP shards; None: one host."""
    with_degrees: bool = False
    """Whether one pipeline worker may have another tensor degree than the others: worth it on unlike devices."""
    max_tensor: int
    """Largest tensor parallel size."""
    max_graph_nodes: int | None = 40_000
    """Largest step of a schedule without a wavefront, in actions and messages; None: any."""


class DividedModel(Protocol):
    """How far a model can be divided."""

    @property
    def num_units(self) -> int:
        """Number of units, the upper limit of stages."""

    def tensor_sizes(self, largest: int) -> list[int]:
        """Return the tensor parallel sizes that the model supports."""

    @property
    def num_experts(self) -> int:
        """Experts of each mixture-of-experts layer, of which expert parallel sizes are divisors; 1 without."""


def enumerate_plans(
    base: Plan, model: DividedModel, num_devices: int, space: SearchSpace
) -> Iterator[tuple[Plan, str]]:
    """Yield every valid plan and its codec."""
    check_choices(base)
    unlike = _meshes_of_degrees(model, num_devices, space.max_tensor) if space.with_degrees else ()
    for mesh in itertools.chain(_meshes(model, num_devices, space.max_tensor), unlike):
        if base.batch < mesh.data:
            continue
        options = itertools.product(
            microbatch_counts(-(-base.batch // mesh.data)),
            space.recomputes if base.training else ("none",),
            space.schedules if mesh.pipeline > 1 else ("1f1b",),
            space.shards if mesh.data > 1 and mesh.expert == 1 and base.training else (False,),
            _fsdp_shards(mesh, space.devices_per_host),
            FSDP_GATHERS if mesh.pipeline > 1 else ("auto",),
            space.zeros if mesh.data > 1 and mesh.expert == 1 and base.training else (0,),
            space.codecs if mesh.pipeline > 1 else ("none",),
            _divisions(base, mesh, space.with_divisions),
        )
        for microbatches, recompute, schedule, shard, fsdp_shards, gather, zero, codec, divisions in options:
            if (shard and zero) or (zero == 2 and microbatches == 1):  # ZeRO-1 is the same there
                continue
            if gather == "step" or (not shard and (gather != "auto" or fsdp_shards)):  # auto is the same
                continue
            plan = replace(
                base,
                mesh=mesh,
                microbatches=microbatches,
                schedule=schedule,  # type: ignore[arg-type]
                recompute=recompute,  # type: ignore[arg-type]
                shard=shard,
                fsdp_shards=fsdp_shards,
                fsdp_gather=gather,  # type: ignore[arg-type]
                zero=zero,
                vocab_parallel=divisions[0],
                sequence_parallel=divisions[1],
                actions=(),
                stages=None,
                cuts=(),
                placement="auto",
                devices=(),
                speeds=(),
                codec=codec,
            )
            for laid_out in layouts(plan, model.num_units) if lacks_order(plan) else [plan]:
                if _is_valid(laid_out, model.num_units, space.max_graph_nodes):
                    yield laid_out, codec


def _divisions(base: Plan, mesh: Mesh, with_all: bool) -> Sequence[tuple[bool, bool]]:
    """Return whether the vocabulary and the sequence are divided: as in the base plan, or always."""
    if mesh.tensor == 1:
        return ((False, False),)
    return ((True, True),) if with_all else ((base.vocab_parallel, base.sequence_parallel),)


def _fsdp_shards(mesh: Mesh, devices_per_host: int | None) -> tuple[int | None, ...]:
    """Return the group sizes of FSDP: all replicas and, with several hosts, those of one host (HSDP)."""
    replicas = (devices_per_host or 0) // (mesh.size("tensor") * mesh.pipeline)
    return (None, replicas) if 1 < replicas < mesh.data and mesh.data % replicas == 0 else (None,)


def _meshes(model: DividedModel, num_devices: int, max_tensor: int) -> Iterator[Mesh]:
    divisors = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    for tensor in model.tensor_sizes(min(num_devices, max_tensor)):
        if tensor not in divisors:
            continue
        for pipeline in divisors:
            if pipeline <= model.num_units and num_devices % (tensor * pipeline) == 0:
                data = num_devices // (tensor * pipeline)
                for expert in range(1, math.gcd(data, model.num_experts) + 1):
                    if data % expert == model.num_experts % expert == 0:
                        yield Mesh(data=data, tensor=tensor, pipeline=pipeline, expert=expert)


def _meshes_of_degrees(model: DividedModel, num_devices: int, max_tensor: int) -> Iterator[Mesh]:
    """Yield meshes in which one pipeline worker has another tensor degree than all others."""
    sizes = model.tensor_sizes(min(num_devices, max_tensor))
    found: dict[tuple[int, ...], None] = {}
    for pipeline in range(2, min(model.num_units, _MAX_UNLIKE_STAGES) + 1):
        for index, (other, own) in itertools.product(range(pipeline), itertools.permutations(sizes, 2)):
            found[(*[other] * index, own, *[other] * (pipeline - 1 - index))] = None
    for degrees in found:
        if num_devices % sum(degrees) == 0:
            yield Mesh(data=num_devices // sum(degrees), pipeline=len(degrees), tensor_degrees=degrees)


def _is_valid(plan: Plan, num_units: int, max_graph_nodes: int | None) -> bool:
    if plan.num_stages > num_units or plan.batch < plan.microbatches * plan.mesh.data:
        return False
    if plan.recompute != "none" and SCHEDULES[plan.schedule].splits_backward:
        return False  # a recomputed stage runs its backward unsplit, so splitting gains nothing
    num_nodes = 4 * plan.num_stages * plan.microbatches
    has_graph = plan.schedule not in _WAVEFRONT_SCHEDULES
    if has_graph and max_graph_nodes is not None and num_nodes > max_graph_nodes:
        return False
    if lacks_order(plan) and plan.num_stages * plan.microbatches > _MAX_SEARCHED_PAIRS:
        return False
    try:
        check_combination(plan)
    except UsageError:
        return False
    return True
