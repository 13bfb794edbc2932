"""One worker's part of a plan: its stages, its optimiser, and one step of training, evaluation or inference.

    plan + model ─► capture ─► cuts ─► (tensor axis) ─► stages of this worker ─► (recompute, dropout keys, batch norm)
         ─► Pipeline ─► (data axis: DistributedDataParallel or FSDP2 for one stage, GradientSum for several)

Every worker is given the same whole batch and takes its share of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from stagewright.engine.batch.batch_norm import DeferredBatchNorm, refuse_torn_norms, tracked_norms
from stagewright.engine.batch.dropout import RandomKey, generators_of, hold_key, kept_generators, key_of, key_stage
from stagewright.engine.batch.splitter import Dealer
from stagewright.engine.data.anchors import reaching
from stagewright.engine.data.clipping import GradientClip
from stagewright.engine.data.data_parallel import DataParallel
from stagewright.engine.data.gradients import GradientSum, holders_of_tied
from stagewright.engine.data.wrap import wrap_data_parallel
from stagewright.engine.pipeline.executor import Links, MicroBatch, Pipeline, StepOutcome
from stagewright.engine.pipeline.link_codec import make_link_codecs
from stagewright.engine.pipeline.recompute import RecomputedForward, changed_inputs
from stagewright.engine.pipeline.transport import TensorShape
from stagewright.engine.state.full_state import full_values
from stagewright.engine.tensor.apply import apply_tensor_parallel, modules_to_close, refuse_open_regions, tensor_plan
from stagewright.engine.tensor.axis import TensorAxis
from stagewright.engine.tensor.layers import shards_of
from stagewright.engine.worker.context import WorkerContext
from stagewright.engine.worker.faults import activity, describe_shapes
from stagewright.engine.worker.memory import MemoryTracker
from stagewright.engine.worker.recorder import recorder
from stagewright.errors import UnknownName, UsageError
from stagewright.graph.capture import capture
from stagewright.graph.stage import Stage
from stagewright.graph.unit_graph import UnitGraph
from stagewright.machine.gloo_threads import patient_threads
from stagewright.schedules.actions import Action, Kind
from stagewright.schedules.catalog import SCHEDULES
from stagewright.spec.plan import Plan
from stagewright.zoo.model import Batch, Model

__all__ = ["Replica", "capture_for", "cut_indices", "on_device"]

_NAMES = {kind: f"backward ({kind.value})" for kind in Kind} | {Kind.FORWARD: "forward", Kind.BACKWARD: "backward"}
CAPTURED_SAMPLES = 4  # enough to tell the batch from other sizes, cheap for a batch of thousands


def on_device(batch: Batch, place: torch.device) -> Batch:
    """The batch with its tensors on a device."""
    args, kwargs, target = pytree.tree_map_only(
        torch.Tensor, lambda leaf: leaf.to(place), (batch.args, batch.kwargs, batch.target)
    )
    return Batch(args=args, kwargs=kwargs, target=target)


def cut_indices(graph: UnitGraph, names: Sequence[str]) -> list[int]:
    """The places of named cuts among a graph's unit calls."""
    known = {call.name: call.index for call in graph.calls[:-1]}
    for name in names:
        if name not in known:
            raise UnknownName("cut", name, known, "(a cut is named by the unit before it)")
    found = [known[name] for name in names]
    if found != sorted(set(found)):
        raise UsageError(f"cuts {list(names)} are not in the order of the model")
    return found


def _first_names(model: nn.Module) -> dict[str, str]:
    """The first of all names that a parameter has, by each; to be asked while the model is whole.

    A shard is another tensor, which only the modules that a stage calls have.
    """
    first: dict[int, str] = {}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in every}


class Replica:
    """This worker's stages and how they are run."""

    def __init__(self, plan: Plan, model: Model, context: WorkerContext, graph: UnitGraph | None = None) -> None:
        self.plan, self.model, self.context = plan, model, context
        self.graph = graph or capture_for(plan, model)
        self.cuts = cut_indices(self.graph, plan.cuts)
        if len(self.cuts) + 1 != plan.num_stages:
            raise UsageError(
                f"the plan names {len(self.cuts)} cuts for {plan.num_stages} stages; name {plan.num_stages - 1}"
            )
        self.stage_workers = plan.stage_workers
        self.memory = MemoryTracker(worker=context.rank, device=context.torch_device, limit_bytes=plan.memory_bytes)
        self.step_number = 0
        self._first_names = _first_names(model.module)
        self.dealer = Dealer(plan, model, self.graph)
        self._keys: list[RandomKey] = []
        self._crossings: dict[tuple[int, int], list[TensorShape]] = {}
        self._shape_texts: dict[tuple[int, int], str] = {}
        self.summed_bytes: dict[str, int] = {}
        """Bytes that the last step gave to sums over replicas (``data``) and holders of tied weights (``tied``)."""
        self.tensor_axis = self._split_layers() if plan.mesh.tensor > 1 else None
        every = self.graph.stages(self.cuts)
        self.stages: dict[int, Stage] = {
            index: stage for index, stage in enumerate(every) if self.stage_workers[index] == context.pipeline
        }
        if plan.training:
            refuse_torn_norms(model.module, every, self.stage_workers, deferred=plan.batch_norm == "deferred")
        self._changed_inputs = changed_inputs(every[0])
        self.module = nn.ModuleList(self.stages.values())
        self._release(every)
        if not plan.shard:  # FSDP2 moves what it divides, unit by unit
            with self.memory.refusals():
                self.module.to(context.torch_device)  # what stayed on the host
        self._norms = DeferredBatchNorm(self.module) if plan.batch_norm == "deferred" and plan.training else None
        if self._norms is not None:
            self._norms.install()
        with self.memory.refusals():
            self.data_axis = self._make_data_axis()
        self._sums = self._gradient_sums(every) if plan.training else None
        self._clip = self._gradient_clip(every, plan.clip) if plan.training and plan.clip is not None else None
        self.codecs = make_link_codecs(plan)
        self.pipeline = self._pipeline()
        self.memory.follow_module(self.module)

    def _split_layers(self) -> TensorAxis:
        """Divide the units' layers over the tensor axis; captured graphs go on calling the same modules."""
        chosen = tensor_plan(self.model.module, self.plan.mesh.tensor)
        refuse_open_regions(chosen, [call.target for call in self.graph.calls])
        return apply_tensor_parallel(self.model.module, self.context.tensor_group, plan=chosen)

    def _release(self, every: Sequence[Stage]) -> None:
        """Free what other workers hold."""
        own = {id(one) for one in self.module.parameters()}
        with torch.no_grad():
            for parameter in self.model.module.parameters():
                if id(parameter) not in own:
                    parameter.data = parameter.data.new_empty(0)

    def _make_data_axis(self) -> DataParallel | None:
        """Replicas of one stage are torch's own; of several stages, only batch norm's statistics are averaged here."""
        if self.plan.mesh.data == 1:
            return None
        averages = self._norms is None
        if len(self.stage_workers) == 1 and self.plan.training:
            (stage,) = self.stages.values()
            units = [self.graph.module(call) for call in self.graph.calls]
            return wrap_data_parallel(
                stage,
                self.context.data_group,
                place=self.context.torch_device,
                shard=self.plan.shard,
                units=units,
                average_batch_norm=averages,
            )
        if self.plan.shard:
            raise UsageError(
                "shard = true divides the parameters of replicas with one stage; it can't be used with a pipeline"
            )
        return DataParallel(self.module, self.context.data_group, tracked_norms(self.module) if averages else [])

    def _gradient_sums(self, every: Sequence[Stage]) -> GradientSum | None:
        """Sums over replicas of a pipeline's stages, and over the holders of tied weights."""
        context, mesh = self.context, self.plan.mesh
        held = [[one for one in stage.parameters() if one.requires_grad] for stage in every]
        tied: list[tuple[nn.Parameter, Any]] = []
        groups: dict[tuple[int, ...], Any] = {}
        parameters = {id(one): one for stage in held for one in stage}
        for identity, workers in holders_of_tied(held, self.stage_workers).items():
            if workers not in groups:  # every worker of the world makes every group, in the same order
                for data in range(mesh.data):
                    for tensor in range(mesh.tensor):
                        ranks = [mesh.rank(data, tensor, worker) for worker in workers]
                        with patient_threads():
                            group = dist.new_group(ranks)
                        if (data, tensor) == (context.data, context.tensor):
                            groups[workers] = group
            if context.pipeline in workers:
                tied.append((parameters[identity], groups[workers]))
        several = len(self.stage_workers) > 1
        if not tied and not (several and mesh.data > 1):
            return None
        own = {index: held[index] for index in self.stages}
        splits = self._splits_backward
        return GradientSum(
            own,
            data_group=context.data_group if several else None,
            tied=tied,
            overlap=len(own) == 1 and not splits,
        )

    def _gradient_clip(self, every: Sequence[Stage], limit: float) -> GradientClip:
        """Which of this worker's gradients count for the norm, so that each of the model's counts once."""
        context = self.context
        held = [[one for one in stage.parameters() if one.requires_grad] for stage in every]
        tied = holders_of_tied(held, self.stage_workers)
        shards, names = shards_of(self.model.module), self._names()

        def counts(parameter: nn.Parameter) -> bool:
            first = tied.get(id(parameter), (context.pipeline,))[0] == context.pipeline
            of_replica = context.data == 0 or isinstance(parameter, DTensor)
            return first and of_replica and (context.tensor == 0 or names[id(parameter)] in shards)

        return GradientClip(
            [one for one in self.module.parameters() if one.requires_grad],
            limit=limit,
            counts=counts,
            num_workers=self.plan.mesh.num_workers,
            device=context.torch_device,
        )

    @property
    def _splits_backward(self) -> bool:
        return SCHEDULES[self.plan.schedule].splits_backward

    def _pipeline(self) -> Pipeline:
        plan, graph = self.plan, self.graph

        self._forwards: dict[int, Any] = {}
        for index, stage in self.stages.items():
            if plan.training:
                key_stage(stage)
            if plan.training and plan.recompute != "none":
                self._forwards[index] = RecomputedForward(
                    stage,
                    policy=plan.recompute,
                    index=index,
                    num_microbatches=plan.microbatches,
                    watch=self.memory.forward,
                    through=self.data_axis if self._wraps else None,
                )
            elif self.data_axis is not None and self._wraps:
                wrapped = self.data_axis
                self._forwards[index] = lambda inputs, number, wrapped=wrapped: wrapped(*inputs)
        return Pipeline(
            self.stages,
            stage_workers=self.stage_workers,
            schedule=plan.schedule,
            num_microbatches=plan.microbatches,
            links=Links(
                shapes=self._crossing,
                needs_gradient=[graph.needs_gradient(cut) for cut in self.cuts],
                codecs=self.codecs,
                coded=[graph.needs_gradient(cut) for cut in self.cuts],
            ),
            context=self.context,
            unflatten=graph.unflatten,
            loss=reaching(self.model.loss) if self._wraps else self.model.loss,
            forwards=self._forwards,
            around=self._around if plan.training else None,
            last_backward=self._sums.last_backward if self._sums is not None else None,
            stage_done=self._sums.stage_done if self._sums is not None else None,
            watch=self._note,
        )

    @property
    def _wraps(self) -> bool:
        """Whether forwards must go through torch's own data-parallel wrapper."""
        return len(self.stage_workers) == 1 and self.plan.training and self.plan.mesh.data > 1

    def _note(self, action: Action, size: int) -> None:
        name = _NAMES[action.kind]
        shapes = self._shapes_at(action.stage, size)
        if self.memory.active:
            self.memory.note(f"{name} stage {action.stage} micro-batch {action.microbatch}")
        activity.begin(name, step=self.step_number, stage=action.stage, microbatch=action.microbatch, shapes=shapes)

    def _crossing(self, cut: int, size: int) -> list[TensorShape]:
        """Every value that crosses a cut, of so many samples; worked out once, for every message asks."""
        if (cut, size) not in self._crossings:
            every = self.graph.crossing_shapes(self.cuts[cut], size)
            self._crossings[cut, size] = [TensorShape(shape=shape, dtype=dtype) for shape, dtype in every]
        return self._crossings[cut, size]

    def _shapes_at(self, stage: int, size: int) -> str:
        """What a stage takes of so many samples, as text, for the message of a fault; made once."""
        if (stage, size) not in self._shape_texts:
            crossing = self._crossing(stage - 1, size) if stage else ()
            self._shape_texts[stage, size] = describe_shapes(crossing) or f"a batch of {size}"
        return self._shape_texts[stage, size]

    def _around(self, action: Action) -> AbstractContextManager[Any]:
        is_forward = action.kind is Kind.FORWARD
        if is_forward:
            hold_key(self._keys[action.microbatch])
        wraps = self._wraps and action.microbatch < len(self._keys) - 1
        if not wraps:
            return self.memory.forward() if is_forward else nullcontext()
        assert self.data_axis is not None
        stack = ExitStack()
        stack.enter_context(self.memory.forward() if is_forward else nullcontext())
        stack.enter_context(self.data_axis.accumulate())
        return stack

    def _microbatches(self, batch: Batch) -> list[MicroBatch]:
        parts = self.dealer.parts(batch, self.context.torch_device, self.context.data)
        if not parts and self.plan.training:  # fewer samples than replicas: this one takes part with a weight of 0
            parts = [replace(self.dealer.parts(batch, self.context.torch_device, 0)[0], weight=0.0)]
        device = self.context.torch_device
        self._keys = [
            key_of(seed=self.plan.seed, step=self.step_number, first_sample=part.first_sample, device=device)
            for part in parts
        ]
        found, sizes = [], set()
        for part in parts:  # parts of one size are alike: the first is checked
            flat = self.graph.leaves if part.size in sizes else self.graph.flatten
            found.append(MicroBatch(flat(part.args, part.kwargs), part.target, part.size, part.weight))
            sizes.add(part.size)
        return [self._with_own_inputs(one) for one in found]

    def _with_own_inputs(self, part: MicroBatch) -> MicroBatch:
        """What the model changes in place is copied: the batch is the caller's, and its parts share one tensor."""
        if 0 not in self.stages or not any(self._changed_inputs):
            return part
        pairs = zip(part.inputs, self._changed_inputs, strict=True)
        return replace(part, inputs=[one.clone() if changed else one for one, changed in pairs])

    def train_step(self, batch: Batch, *, keep_outputs: bool = False) -> StepOutcome:
        """Forward, backward and all sums of gradients of one batch; ``change_parameters`` comes next."""
        parts = self._microbatches(batch)
        for forward in self._forwards.values():
            if isinstance(forward, RecomputedForward):
                forward.num_microbatches = len(parts)
        with kept_generators(generators_of(self.context.torch_device)):
            outcome = self.pipeline.train_step(parts, keep_outputs=keep_outputs)
        activity.begin("sum of gradients", step=self.step_number)
        self.memory.note("sum of gradients")
        if self._sums is not None:
            self.summed_bytes = self._sums.finish()
        if self._norms is not None:
            several = self.context.data_group is not None
            weight = sum(part.weight for part in parts)
            self._norms.finish_step(self._sum_statistics if several else None, is_counted=weight > 0)
        if self.data_axis is not None:
            self.data_axis.synchronise(sum(part.weight for part in parts))
        self.step_number += 1
        return outcome

    def change_parameters(self, optimizer: torch.optim.Optimizer | None) -> torch.Tensor | None:
        """Clip the gradients, where the plan says so, and let the optimiser step; their norm before clipping.

        Every worker calls this, also one that has nothing to train.
        """
        activity.begin("optimizer", step=self.step_number - 1)
        self.memory.note("optimizer")
        begun = recorder.now()
        norm = self._clip.apply() if self._clip is not None else None
        if optimizer is not None:
            optimizer.step()
            recorder.add("optimizer", begun)
        return norm

    def _sum_statistics(self, sums: torch.Tensor) -> None:
        """Sum batch norm's statistics over the replicas."""
        start = recorder.now()
        dist.all_reduce(sums, group=self.context.data_group)
        recorder.add("collective", start, num_bytes=sums.numel() * sums.element_size(), note="data")

    def infer(self, batch: Batch) -> StepOutcome:
        """Forward alone of one batch."""
        outcome = self.pipeline.evaluate(self._microbatches(batch), with_loss=True)
        self.step_number += 1
        return outcome

    def stream(self, batch: Batch, repeats: int) -> Iterator[Any]:
        """The same batch over and over as one stream of micro-batches."""
        parts = self._microbatches(batch)
        return self.pipeline.stream(self._with_own_inputs(part) for _ in range(repeats) for part in parts)

    def total_loss(self, outcome: StepOutcome) -> float:
        """The loss of the whole batch, the same on every worker."""
        own = outcome.loss if outcome.loss is not None else torch.zeros((), device=self.context.torch_device)
        total = own.detach().double().reshape(1) / self.plan.mesh.tensor
        if self.plan.mesh.num_workers > 1:
            activity.turn("reduce loss")
            start = recorder.now()
            dist.all_reduce(total)
            recorder.add("collective", start, num_bytes=total.element_size(), note="loss")
        return float(total)

    def zero_gradients(self) -> None:
        """Forget gradients."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of this worker's parameters in full, under the model's own names."""
        held = {name: one.grad for name, one in self.trained().items() if one.grad is not None}
        return full_values(self.model.module, held, torch.device("cpu"))

    def trained(self) -> dict[str, nn.Parameter]:
        """What is trained here, under the model's own names."""
        names = self._names()
        return {names[id(one)]: one for one in self.module.parameters() if one.requires_grad}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Buffers of this worker's stages, under the first of the model's own names."""
        first: dict[int, str] = {}
        every = self.model.module.named_buffers(remove_duplicate=False)
        names = {name: first.setdefault(id(value), name) for name, value in every}
        return {
            names.get(name, name): value
            for stage in self.stages.values()
            for name, value in stage.named_buffers()
            if "stagewright_" not in name
        }

    def _names(self) -> dict[int, str]:
        """The model's first name of each parameter."""
        names: dict[int, str] = {}
        for stage in self.stages.values():
            for name, parameter in stage.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), self._first_names.get(name, name))
        return names

    @contextmanager
    def tracked(self) -> Iterator[None]:
        """A step whose memory is counted."""
        with self.memory.tracking() if self.plan.training else nullcontext():
            yield


def capture_for(plan: Plan, model: Model) -> UnitGraph:
    """Capture a model with the plan's units: from a few samples where its graph then serves any number of them.

    Units that are chosen automatically are no finer than what workers of a tensor axis share.
    """
    if plan.training:
        _refuse_sparse(model.module)
    units = plan.units if plan.units in ("auto", "leaf") else [name.strip() for name in plan.units.split(",")]
    graph = _captured(model, units)
    if plan.mesh.tensor > 1 and units == "auto":
        shared = tensor_plan(model.module, plan.mesh.tensor)
        closed = modules_to_close(shared, [call.target for call in graph.calls])
        return _captured(model, closed) if closed else graph
    return graph


def _captured(model: Model, units: str | list[str]) -> UnitGraph:
    if model.batch_size > CAPTURED_SAMPLES:
        tensors = [one for one in pytree.tree_leaves((model.args, model.kwargs)) if isinstance(one, torch.Tensor)]
        few = on_device(model.example(CAPTURED_SAMPLES), tensors[0].device if tensors else torch.device("cpu"))
        graph = capture(model.module, few.args, few.kwargs, units)
        if graph.dynamic:
            return graph
    return capture(model.module, model.args, model.kwargs, units)


def _refuse_sparse(module: torch.nn.Module) -> None:
    for name, one in module.named_modules():
        if isinstance(one, torch.nn.Embedding | torch.nn.EmbeddingBag) and one.sparse and one.weight.requires_grad:
            raise UsageError(
                f"{name} is an embedding with sparse=True, but gradients are summed and compared as dense tensors; "
                "build it with sparse=False"
            )
