"""What workers synchronize in a training step: gradients, tied weights, batch norm statistics, the gradient norm.

one stage per replica     DistributedDataParallel or FSDP2 wraps the stage
several stages            GradientAllReduce, bucketed and overlapped with backward
several stages, FSDP2     FSDPStages or StepFSDPReplica
ZeRO-1, ZeRO-2            GradientReduceScatter, and an all-gather of the parameters after the optimizer step
tied weights              GradientAllReduce over the workers that hold them
divided sequences         all-reduce of the gradients of blocks over the context axis, or of norms over the tensor axis
experts                   ExpertGradientSync over the replicas that hold the same ones
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from stagewright.engine.batch.batch_norm import DeferredBatchNorm, find_tracked_norms
from stagewright.engine.context.gradients import sum_gradients
from stagewright.engine.data.clipping import GradientClipper
from stagewright.engine.data.data_parallel import DataParallelReplica
from stagewright.engine.data.ddp import DDPReplica
from stagewright.engine.data.fsdp import FSDPReplica
from stagewright.engine.data.gradient_allreduce import GradientAllReduce, tied_weight_holders
from stagewright.engine.data.hsdp import ShardGroups, make_shard_groups
from stagewright.engine.data.parameter_shards import ParameterShards
from stagewright.engine.data.sharded_replica import ShardedReplica
from stagewright.engine.data.wrap import FSDPStages, broadcast_from_first, wrap_data_parallel, wrap_stages
from stagewright.engine.data.zero import GradientReduceScatter
from stagewright.engine.expert.gradients import ExpertGradientSync
from stagewright.engine.parallel.model_part import ModelPart
from stagewright.engine.tensor.layers import shard_layouts
from stagewright.engine.worker.recorder import recorder
from stagewright.errors import UsageError
from stagewright.machine.gloo_threads import sched_batch_threads
from stagewright.spec.mesh import Mesh
from stagewright.spec.searched_order import splits_backward


class GradientSync:
    """Synchronization of one worker's part of the model with other workers."""

    def __init__(self, part: ModelPart) -> None:
        plan = part.plan
        self._part = part
        self._norms = DeferredBatchNorm(part.module) if plan.batch_norm == "deferred" and plan.training else None
        if self._norms is not None:
            self._norms.install(compiled=plan.compile != "none")
        self._shard_groups: ShardGroups | None = None
        if plan.shard and plan.num_shards < plan.mesh.data:
            self._shard_groups = make_shard_groups(plan.mesh, part.context.rank, plan.num_shards)
        with part.memory.explain_oom():
            self.data_axis = self._make_data_axis()
        """The data-parallel replica; None with one replica."""
        if isinstance(self.data_axis, ShardedReplica | FSDPStages):
            part.memory.follow_parameters(self.data_axis.gathered_parameters)
        self._tied = tied_weight_holders(part.stage_names, part.stage_workers)
        self.all_reduce: GradientAllReduce | GradientReduceScatter | None = None
        if plan.training:
            self.all_reduce = self._make_reduce_scatter() if plan.zero else self._make_all_reduce()
        self._experts = self._make_expert_sync() if plan.training and part.expert_axis is not None else None
        self.clipper = self._make_clipper(plan.clip) if plan.training and plan.clip is not None else None
        self.allreduce_bytes: dict[str, int] = {}
        """Bytes that the last step all-reduced over replicas (``data``) and holders of tied weights (``tied``)."""

    @property
    def wrappers(self) -> Mapping[int, DataParallelReplica]:
        """The DDP and FSDP wrappers through which the forwards of these stages must run, by stage."""
        plan = self._part.plan
        if isinstance(self.data_axis, FSDPStages):
            return self.data_axis.replicas if plan.training else {}
        is_wrapped = isinstance(self.data_axis, DDPReplica | FSDPReplica)
        return dict.fromkeys(self._part.stages, self.data_axis) if is_wrapped and self.data_axis else {}

    def finish_step(self, weight: float) -> None:
        """Finish the gradient all-reduces and batch norm statistics; ``weight``: this replica's share of the batch."""
        if self.data_axis is not None and self._part.plan.shard:
            self.data_axis.synchronize(weight)  # tied weights need complete gradients of the shards
        sent = {} if self.all_reduce is None else self.all_reduce.finish()
        if self._experts is not None:
            sent["data"] = sent.get("data", 0) + self._experts.finish()
        if self._part.sequence_axis is not None:
            sum_gradients(self._part.sequence_axis, self._part.divided_parameters())
        self.allreduce_bytes = sent
        if self._norms is not None:
            has_replicas = self._part.context.data_group is not None
            self._norms.finish_step(self._all_reduce_statistics if has_replicas else None, is_counted=weight > 0)
        if self.data_axis is not None and not self._part.plan.shard:
            self.data_axis.synchronize(weight)

    def final_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters whose gradients are final after the backward of their only stage, by name."""
        part = self._part
        counts = Counter(id(parameter) for stage in part.stages.values() for parameter in set(stage.parameters()))
        summed = set(map(id, part.divided_parameters()))
        return {
            name: parameter
            for name, parameter in part.trainable_parameters().items()
            if counts[id(parameter)] == 1 and name not in self._tied and id(parameter) not in summed
        }

    def gather_parameters(self) -> None:
        """All-gather the parameters after an optimizer step of ZeRO's shards."""
        if isinstance(self.all_reduce, GradientReduceScatter):
            self.all_reduce.gather_parameters()

    def _make_data_axis(self) -> DataParallelReplica | None:
        """Wrap a replica of one stage in DDP or FSDP, several stages in FSDP; else only average batch norms."""
        part, plan, context = self._part, self._part.plan, self._part.context
        if plan.mesh.data == 1:
            return None
        averages = self._norms is None
        if plan.shard and (len(part.stage_workers) > 1 or not plan.training or plan.gathers_once):
            return self._shard_stages(averages)
        if len(part.stage_workers) == 1 and plan.training and not plan.zero:
            (stage,) = part.stages.values()
            return wrap_data_parallel(
                stage,
                context.data_group,
                device=context.torch_device,
                shard=plan.shard,
                units=part.graph.fsdp_units(),
                average_batch_norm=averages,
                read_weights=part.read_weights if part.model.weights is not None and plan.shard else None,
                divided=part.expert_parameters,
                groups=self._shard_groups,
                on_change=part.memory.update,
            )
        if plan.zero:
            tensors = (*part.module.parameters(), *part.module.buffers())
            broadcast_from_first(tensors, context.data_group, context.torch_device)
        norms = find_tracked_norms(part.module) if averages else []
        return DataParallelReplica(part.module, context.data_group, norms)

    def _shard_stages(self, averages: bool) -> DataParallelReplica:
        """Shard the parameters of the stages of a pipeline, or of a model for inference."""
        part, plan, context = self._part, self._part.plan, self._part.context
        if not plan.gathers_once:
            _check_shared(part)
        return wrap_stages(
            part.stages,
            context.data_group,
            device=context.torch_device,
            units=part.graph.fsdp_units(),
            every_microbatch=not plan.gathers_once,
            average_batch_norm=averages and plan.training,
            read_weights=part.read_weights if part.model.weights is not None else None,
            on_change=part.memory.update,
            groups=self._shard_groups,
        )

    def _make_all_reduce(self) -> GradientAllReduce | None:
        """Make the all-reduces over replicas of a pipeline and over the holders of tied weights."""
        part, context = self._part, self._part.context
        tied = self._tied_groups()
        has_pipeline = len(part.stage_workers) > 1
        data_group = context.data_group if has_pipeline and not part.plan.shard else None
        if not tied and data_group is None:
            return None
        parameters = {
            index: [value for value in part.stage_parameters[index] if id(value) not in part.expert_parameters]
            for index in part.stages
        }
        return GradientAllReduce(
            parameters, data_group=data_group, tied=tied, repeated=self._repeated_tied(), overlap=self._can_overlap
        )

    def _make_expert_sync(self) -> ExpertGradientSync:
        """Make the all-reduce of experts' gradients over the replicas that hold the same experts."""
        part, context = self._part, self._part.context
        held = [value for value in part.module.parameters() if id(value) in part.expert_parameters]
        trained = [parameter for parameter in held if parameter.requires_grad]
        return ExpertGradientSync(trained, context.expert_group, context.same_experts_group)

    def _make_reduce_scatter(self) -> GradientReduceScatter:
        """Make the reduce-scatters and all-gathers of ZeRO, and this replica's shards of the parameters."""
        part = self._part
        assert self.data_axis is not None
        trained = part.trainable_parameters().values()
        part.shards = ParameterShards(trained, self.data_axis, part.context.torch_device)
        reduce_scatter = GradientReduceScatter(
            {index: part.stage_parameters[index] for index in part.stages},
            part.shards,
            self.data_axis,
            every_microbatch=part.plan.zero == 2,
            tied=self._tied_groups(),
            overlap=self._can_overlap,
            on_change=part.memory.update,
        )
        part.memory.follow("gradients", reduce_scatter.held_tensors)
        return reduce_scatter

    @property
    def _can_overlap(self) -> bool:
        """Whether gradients may be exchanged inside a backward: one stage, whose backward is not split."""
        plan, context = self._part.plan, self._part.context
        return len(self._part.stages) == 1 and not splits_backward(plan, context.pipeline)

    def _tied_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """Return this worker's tied weights, each with the process group of its holders."""
        context, mesh = self._part.context, self._part.plan.mesh
        parameters = self._part.trainable_parameters()
        tied: list[tuple[nn.Parameter, Any]] = []
        groups: dict[tuple[int, ...], Any] = {}
        for name, workers in self._tied.items():
            if workers not in groups:  # every worker of the world creates every group, in the same order
                for ranks in _tied_ranks(mesh, workers):
                    with sched_batch_threads():
                        group = dist.new_group(ranks)
                    if context.rank in ranks:
                        groups[workers] = group
            if context.pipeline in workers:
                tied.append((parameters[name], groups[workers]))
        return tied

    def _repeated_tied(self) -> frozenset[int]:
        """Return the tied weights whose gradient another tensor worker of this stage sums for it, by identity."""
        context, degrees = self._part.context, self._part.plan.mesh.degrees
        parameters = self._part.trainable_parameters()
        return frozenset(
            id(parameters[name])
            for name, workers in self._tied.items()
            if context.tensor and context.pipeline in workers and len({degrees[worker] for worker in workers}) > 1
        )

    def _make_clipper(self, limit: float) -> GradientClipper:
        """Make the gradient clipper; each parameter of the model counts once for the norm, on one worker."""
        part, context = self._part, self._part.context
        layouts, trained = shard_layouts(part.model.module), part.trainable_parameters()

        def counts(name: str, parameter: nn.Parameter) -> bool:
            full = trained[name]
            is_first_holder = self._tied.get(name, (context.pipeline,))[0] == context.pipeline
            holder = context.data // context.mesh.expert if id(full) in part.expert_parameters else context.data
            is_sharded = isinstance(parameter, DTensor) or (part.plan.zero > 0 and parameter.ndim > 0)
            of_replica = holder == 0 or (is_sharded and holder < part.plan.num_shards)
            return is_first_holder and of_replica and (context.tensor == 0 or name in layouts)

        stepped = part.optimizer_parameters()
        return GradientClipper(
            list(stepped.values()),
            limit=limit,
            counted=[parameter for name, parameter in stepped.items() if counts(name, parameter)],
            num_workers=part.plan.mesh.num_workers,
            device=context.torch_device,
        )

    def _all_reduce_statistics(self, sums: torch.Tensor) -> None:
        """All-reduce batch norm statistics over the replicas."""
        start = recorder.now()
        dist.all_reduce(sums, group=self._part.context.data_group)
        recorder.add("collective", start, num_bytes=sums.nbytes, note="data")


def _tied_ranks(mesh: Mesh, workers: Sequence[int]) -> list[list[int]]:
    """Return the groups of ranks that sum a tied weight: one for each tensor index; one for all, where degrees differ.

    data=1, tensor=2:1, holders 0 and 1:   worker 0 (its gradient) + worker 2 (zeros, its stage has it) + worker 1
    """
    if len({mesh.degrees[worker] for worker in workers}) == 1:
        indices = range(mesh.degrees[workers[0]])
        return [
            [mesh.rank(data, index, worker) for worker in workers] for data in range(mesh.data) for index in indices
        ]
    return [
        [mesh.rank(data, index, worker) for index, worker in mesh.positions if worker in workers]
        for data in range(mesh.data)
    ]


def _check_shared(part: ModelPart) -> None:
    """Refuse a parameter that two stages of this worker hold: gathered separately, it would be two parameters."""
    for index, stage in part.stages.items():
        own = set(map(id, stage.parameters()))
        for later in (other for other in part.stages if other > index):
            names = part.parameter_names()
            both = [names[id(value)] for value in part.stages[later].parameters() if id(value) in own]
            if both:
                raise UsageError(
                    f'fsdp_gather = "microbatch" gathers each stage separately, but stages {index} and {later} on one '
                    f'worker share {both[0]}: use fsdp_gather = "step", or a schedule that puts them on two workers'
                )
