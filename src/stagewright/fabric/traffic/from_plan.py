"""Traffic of one training step of a plan: gradient all-reduce (DP), activations between stages (PP), all-reduce (TP).

    data=2, pipeline=2      replica 0:  0 ──crossing──► 1        pipeline: groups (0, 1), (2, 3), per micro-batch in
                            replica 1:  2 ──crossing──► 3                  forward, and the same bytes in backward
                                        ╰─gradients─╯            data: groups (0, 2) for stage 0, (1, 3) for stage 1

Each distinct message is measured once per trial; `count` is how often the step sends it. Gaps are the profiled times of
the units between two messages. FSDP, ZeRO and sequence parallelism send a reduce-scatter and an all-gather instead of
an all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stagewright.errors import UsageError
from stagewright.fabric.traffic.from_model import buckets
from stagewright.fabric.traffic.workload import Message, Workload
from stagewright.profiler.profile import amount_of

if TYPE_CHECKING:
    from stagewright.profiler.profile import Profile
    from stagewright.spec.plan import Plan

_TENSOR_ALLREDUCES = 2  # per block in forward and in backward: after attention and after the feed-forward layer
_BUCKET_BYTES = 25 * 2**20  # DDP's default


def profile_plan(plan: Plan) -> Profile:
    """Profile the plan's model for one micro-batch, or read the profile from the cache."""
    from stagewright.cluster.device import available_cores
    from stagewright.graph import capture
    from stagewright.profiler import profile

    microbatch_size = max(1, plan.batch // plan.mesh.data // plan.microbatches)
    model = plan.model.load(batch=microbatch_size, dtype=plan.dtype)
    model.module.train(plan.training)
    units: Any = plan.units if plan.units in ("auto", "leaf") else [name.strip() for name in plan.units.split(",")]
    graph = capture(model.module, model.args, model.kwargs, units=units)
    return profile(
        graph,
        model.args,
        model.kwargs,
        name=model.name,
        device=f"cpu:{min(available_cores())}",
        repeats=2,
        training=plan.training,
    )


def stage_ranges(plan: Plan, names: list[str]) -> list[tuple[int, int]]:
    """Return the first and last unit of each stage."""
    if plan.num_stages > 1 and not plan.cuts:
        raise UsageError(
            f"the plan has {plan.num_stages} stages but no cuts; write cuts = [...] "
            "(see `stagewright split`), or use plan.toml of a run folder"
        )
    missing = [cut for cut in plan.cuts if cut not in names]
    if missing:
        raise UsageError(f"the plan cuts after {missing[0]!r}, but the model's units are {', '.join(names)}")
    ends = [*(names.index(cut) for cut in plan.cuts), len(names) - 1]
    starts = [0, *(end + 1 for end in ends[:-1])]
    return list(zip(starts, ends, strict=True))


def from_plan(
    plan: Plan, profile: Profile, *, name: str, algorithm: str = "ring", gaps: bool = True, trials: int, **more: Any
) -> Workload:
    """Create the workload of one training step of a plan."""
    mesh = plan.mesh
    if mesh.num_workers < 2:
        raise UsageError(
            f"{name} runs on one worker, so there is nothing to send; give it a [mesh] with at least 2 workers"
        )
    if mesh.expert > 1 or mesh.context > 1:
        raise UsageError(
            f"{name} has the mesh {mesh}, but only the traffic of data, tensor and pipeline parallelism is derived: "
            f"leave out {'expert' if mesh.expert > 1 else 'context'}"
        )
    if mesh.tensor_degrees:
        raise UsageError(
            f"{name} has the mesh {mesh}, but only the traffic of one tensor degree for all stages is derived: use "
            f"tensor = {mesh.tensor}"
        )
    units = profile.units
    ranges = stage_ranges(plan, [unit.name for unit in units])
    parameters = [unit.parameter_bytes for unit in units]
    messages: list[Message] = []

    def gap(seconds: float) -> float:
        return seconds if gaps else 0.0

    for stage, (first, last) in enumerate(ranges):
        stage_units = units[first : last + 1]
        forward_s = sum(unit.forward.median_s for unit in stage_units) / mesh.tensor
        if mesh.tensor > 1:
            blocks = {unit.block for unit in stage_units if unit.block is not None}
            if blocks:
                size = max(unit.output_bytes for unit in stage_units if unit.block is not None)
                count = _TENSOR_ALLREDUCES * len(blocks) * plan.microbatches * (2 if plan.training else 1)
                collectives = ("all-gather", "reduce-scatter") if plan.sequence_parallel else (algorithm,)
                for collective in collectives:
                    kind = collective if plan.sequence_parallel else "all-reduce"
                    messages.append(
                        Message(
                            name=f"tensor-parallel {kind}, stage {stage}",
                            algorithm=collective,
                            num_bytes=size,
                            groups=_groups(plan, "tensor", stage),
                            gap_s=gap(forward_s / (_TENSOR_ALLREDUCES * len(blocks))),
                            count=count,
                        )
                    )
        if stage + 1 < len(ranges) and plan.stage_workers[stage] != plan.stage_workers[stage + 1]:
            crossing = units[last].crossing_bytes
            ends = _ends(plan, stage)
            messages.append(
                Message(
                    name=f"stage {stage} → {stage + 1}",
                    algorithm="pipeline",
                    num_bytes=crossing,
                    groups=ends,
                    gap_s=gap(forward_s),
                    count=plan.microbatches,
                )
            )
            if plan.training:
                back_s = sum(unit.backward_s for unit in units[ranges[stage + 1][0] : ranges[stage + 1][1] + 1])
                messages.append(
                    Message(
                        name=f"stage {stage + 1} → {stage}",
                        algorithm="pipeline",
                        num_bytes=crossing,
                        groups=tuple((target, source) for source, target in ends),
                        gap_s=gap(back_s / mesh.tensor),
                        count=plan.microbatches,
                    )
                )
    if mesh.data > 1 and plan.training:
        for stage, (first, last) in enumerate(ranges):
            layers = [
                (
                    units[index].name,
                    (
                        amount_of(parameters, first, index)
                        - (amount_of(parameters, first, index - 1) if index > first else 0)
                    )
                    // mesh.tensor,
                )
                for index in range(last, first - 1, -1)
            ]
            backward_s = sum(unit.backward_s for unit in units[first : last + 1]) / mesh.tensor
            gradient_buckets = buckets([layer for layer in layers if layer[1]], _BUCKET_BYTES)
            for bucket, size in gradient_buckets:
                for exchange in _exchanges(plan, algorithm, stage):
                    is_sharded = plan.num_shards > 1
                    messages.append(
                        Message(
                            name=f"gradients of {bucket}" + (f", {exchange.algorithm}" if is_sharded else ""),
                            algorithm=exchange.algorithm,
                            num_bytes=size // exchange.divisor,
                            groups=exchange.groups,
                            gap_s=gap(backward_s / len(gradient_buckets)),
                            count=exchange.count,
                        )
                    )
    if not messages:
        raise UsageError(f"{name} sends nothing between its {mesh.num_workers} workers")
    return Workload(name=name, num_ranks=mesh.num_workers, messages=tuple(messages), trials=trials, **more)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A collective of a stage's gradients or parameters in a step."""

    algorithm: str
    groups: tuple[tuple[int, ...], ...]
    count: int = 1
    """How often a step runs it."""
    divisor: int = 1
    """Parts that its tensors were divided into before."""


def _exchanges(plan: Plan, algorithm: str, stage: int) -> Iterator[_Exchange]:
    """Yield the collectives over replicas; HSDP shards in groups of neighbors, and all-reduces across groups."""
    replicas, shards = _groups(plan, "data", stage), plan.num_shards
    if shards == 1:
        yield _Exchange(algorithm, replicas)
        return
    inside = tuple(ranks[first : first + shards] for ranks in replicas for first in range(0, len(ranks), shards))
    yield _Exchange("reduce-scatter", inside, plan.microbatches if plan.scatters_every_microbatch else 1)
    gathers_often = plan.shard and not plan.gathers_once
    yield _Exchange("all-gather", inside, 2 * plan.microbatches if gathers_often else 1)
    if shards < plan.mesh.data:
        across = tuple(ranks[index::shards] for ranks in replicas for index in range(shards))
        yield _Exchange(algorithm, across, divisor=shards)


def _groups(plan: Plan, axis: Any, stage: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of workers along an axis that hold the stage."""
    mesh, coordinate = plan.mesh, plan.stage_workers[stage]
    ranks = [rank for rank in range(mesh.num_workers) if mesh.coordinates(rank)[2] == coordinate]
    return tuple(dict.fromkeys(mesh.ranks_along(axis, rank) for rank in ranks))


def _ends(plan: Plan, stage: int) -> tuple[tuple[int, ...], ...]:
    """Return the workers of a stage and of the next one, in each replica."""
    mesh = plan.mesh
    source, target = plan.stage_workers[stage], plan.stage_workers[stage + 1]
    return tuple(
        (mesh.rank(data, tensor, source), mesh.rank(data, tensor, target))
        for data in range(mesh.data)
        for tensor in range(mesh.tensor)
    )
