"""Run steps of one worker's part of the model: training, inference, and the optimizer step.

    batch ─► this replica's micro-batches ─► PipelineExecutor ─► gradient all-reduce ─► optimizer step

Every worker gets the same whole batch and takes its share of it, or its replica's share alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stagewright import structure
from stagewright.engine.batch.microbatch import MicroBatch
from stagewright.engine.batch.precision import autocast_of
from stagewright.engine.batch.random_key import RandomKey, device_generators, make_key, preserve_generators, set_key
from stagewright.engine.batch.splitter import BatchSplitter, ReplicaShare, move_microbatch
from stagewright.engine.data.data_parallel import DataParallelReplica
from stagewright.engine.data.fsdp_step import StepFSDPReplica
from stagewright.engine.data.keep_differentiable import keep_loss_differentiable
from stagewright.engine.data.zero import GradientReduceScatter
from stagewright.engine.parallel.compilation import compile_part
from stagewright.engine.parallel.gradient_sync import GradientSync
from stagewright.engine.parallel.loss_scale import LossScaler
from stagewright.engine.parallel.model_part import ModelPart
from stagewright.engine.parallel.optimizer import (
    MakeOptimizer,
    OptimizerInBackward,
    changes_elements,
    make_optimizer,
    step_shards,
)
from stagewright.engine.parallel.shape_variants import ShapeVariants
from stagewright.engine.pipeline.activation_checkpointing import CheckpointedForward
from stagewright.engine.pipeline.activation_offload import ActivationOffload, offload_units
from stagewright.engine.pipeline.attention_checkpointing import checkpoint_attentions
from stagewright.engine.pipeline.config import PipelineConfig, PipelineHooks, PipelineResult, StageForward
from stagewright.engine.pipeline.cuda_graphs import GradientSums, GraphedForward
from stagewright.engine.pipeline.executor import PipelineExecutor
from stagewright.engine.pipeline.link_codec import make_link_codecs
from stagewright.engine.pipeline.links import Links
from stagewright.engine.pipeline.unit_checkpointing import checkpoint_units
from stagewright.engine.weight_gradients.in_products import accumulate_in_products, accumulates_in_products
from stagewright.engine.worker.context import WorkerContext
from stagewright.engine.worker.faults import activity, describe_shapes
from stagewright.engine.worker.recorder import recorder
from stagewright.graph.unit_graph import UnitGraph
from stagewright.schedules.action_order import Action, Kind
from stagewright.spec.activation_checkpointing import offloaded_units, recomputes_stages
from stagewright.spec.plan import OptimizerSpec, Plan
from stagewright.zoo.model import Batch, Model

_ACTION_NAMES = {kind: f"backward ({kind.value})" for kind in Kind}
_ACTION_NAMES |= {Kind.FORWARD: "forward", Kind.BACKWARD: "backward"}


class StepRunner:
    """Runs steps of this worker's part of a model."""

    def __init__(
        self,
        plan: Plan,
        model: Model,
        context: WorkerContext,
        graph: UnitGraph | None = None,
        count_items: Callable[[Batch], float] | None = None,
    ) -> None:
        """``count_items``: see ``BatchSplitter``."""
        self.plan, self.model, self.context = plan, model, context
        self.part = ModelPart(plan, model, context, graph)
        self.memory = self.part.memory
        self.splitter = BatchSplitter(plan, model, self.part.graph, count_items)
        self.sync = GradientSync(self.part)
        self.codecs = make_link_codecs(plan)
        self.scaler: LossScaler | None = None
        """The loss scale of fp16-mixed training."""
        if plan.training and plan.precision == "fp16-mixed":
            self.scaler = LossScaler(plan.mesh.num_workers, context.torch_device)
        self.in_backward: OptimizerInBackward | None = None
        """The optimizer steps inside backward, if the plan has any; `make_optimizer` sets its optimizer."""
        if plan.optimizer_in_backward:
            self.in_backward = OptimizerInBackward(self.sync.final_parameters(), self.memory.count_gradient)
        self.step_number = 0
        self._hooks = TrainingHooks(self) if plan.training else ActivityHooks(self, self.part.links)
        self.config = PipelineConfig(
            stage_workers=self.part.stage_workers,
            schedule=plan.schedule,
            actions=plan.actions,
            num_microbatches=plan.microbatches,
            links=self.part.links,
            codecs=self.codecs,
            unflatten=self.part.graph.unflatten,
            loss=keep_loss_differentiable(model.loss) if self.sync.wrappers else model.loss,
            autocast=functools.partial(autocast_of, plan, context.torch_device),
            whole_backward=self.part.compile_mode != "none" or plan.cuda_graphs,
            loss_scale=lambda: 1.0 if self.scaler is None else self.scaler.scale,
        )
        if plan.cuda_graphs:
            self._hooks.use_cuda_graphs()
        elif accumulates_in_products(plan, context.torch_device):
            accumulate_in_products(self.part.stages.values())
        self._executor = PipelineExecutor(self.part.stages, self.config, context, self._hooks)
        self.memory.follow_module(self.part.module)
        compile_part(self.part.stages, self.part.graph, self.part.compile_mode)

    def make_optimizer(self, make: MakeOptimizer | OptimizerSpec | None = None) -> torch.optim.Optimizer | None:
        """Make this worker's optimizer, by default the plan's; None if it has nothing to train."""
        parameters = list(self.part.optimizer_parameters().values())
        if not parameters:
            return None
        make = self.plan.optimizer if make is None else make
        optimizer = make_optimizer(make, parameters) if isinstance(make, OptimizerSpec) else make(parameters)
        if self.in_backward is not None:
            self.in_backward.optimizer = optimizer
        return optimizer

    def train_step(
        self, batch: Batch | ReplicaShare | Sequence[Batch], *, keep_outputs: bool = False
    ) -> PipelineResult:
        """Run forward, backward and the gradient all-reduce of one batch; ``optimizer_step`` comes next.

        A list of batches is a batch whose micro-batches are given. With several, no optimizer steps inside backward.
        """
        microbatches = self.split(batch)
        assert isinstance(self._hooks, TrainingHooks), "the plan is for inference"
        self._hooks.begin_step(microbatches)
        in_backward = self.in_backward if len(microbatches) == 1 else None
        stepping = in_backward.backward() if in_backward is not None else nullcontext()
        with preserve_generators(device_generators(self.context.torch_device)), stepping:
            result = self._executor.train_step(microbatches, keep_outputs=keep_outputs)
        activity.begin("gradient all-reduce", step=self.step_number)
        self.memory.note("gradient all-reduce")
        self.sync.finish_step(sum(microbatch.weight for microbatch in microbatches))
        if self.scaler is not None:
            self.scaler.unscale(self.part.optimizer_parameters().values())
        self.step_number += 1
        return result

    def optimizer_step(self, optimizer: torch.optim.Optimizer | None) -> torch.Tensor | None:
        """Clip the gradients if the plan says so, and step the optimizer; return the norm before clipping.

        A step whose fp16 gradients overflowed is skipped.
        Every worker must call this, also one without trainable parameters.
        """
        activity.begin("optimizer", step=self.step_number - 1)
        self.memory.note("optimizer")
        start = recorder.now()
        norm = None if self.sync.clipper is None else self.sync.clipper.apply()
        is_skipped = self.scaler is not None and self.scaler.overflowed
        if self.scaler is not None:
            self.scaler.update()
        if optimizer is not None and not is_skipped:
            step_shards(optimizer) if self.plan.shard and changes_elements(optimizer) else optimizer.step()
            recorder.add("optimizer", start)
            self.sync.gather_parameters()
        return norm

    def infer(self, batch: Batch) -> PipelineResult:
        """Run forward and loss of one batch."""
        result = self._executor.evaluate(self.split(batch), with_loss=True)
        self.step_number += 1
        return result

    def stream(self, batch: Batch, repeats: int) -> Iterator[Any]:
        """Run inference on the same batch ``repeats`` times, as one stream of micro-batches."""
        microbatches = self.split(batch)
        return self._executor.stream(
            self._copy_mutated_inputs(microbatch) for _ in range(repeats) for microbatch in microbatches
        )

    def total_loss(self, result: PipelineResult) -> float:
        """Return the loss of the whole batch, the same on every worker."""
        loss = result.loss if result.loss is not None else torch.zeros((), device=self.context.torch_device)
        total = loss.detach().double().reshape(1) / self.context.num_tensor
        if self.plan.mesh.num_workers > 1:
            activity.switch("reduce loss")
            start = recorder.now()
            dist.all_reduce(total)
            recorder.add("collective", start, num_bytes=total.element_size(), note="loss")
        return float(total)

    def split(
        self, batch: Batch | ReplicaShare | Sequence[Batch], evaluation_variants: ShapeVariants | None = None
    ) -> list[MicroBatch]:
        """Return the micro-batches of this worker's replica, ready for the executor."""
        device, variants = self.context.torch_device, evaluation_variants or self.part.variants
        everywhere = variants.assign(self.splitter.split(batch, torch.device("cpu")))  # or its share, if that is all
        microbatches = [microbatch for microbatch in everywhere if microbatch.replica == self.context.data]
        # With fewer samples than replicas, take part with a weight of 0 in the collectives of the others.
        has_collectives = self.plan.shard or self.plan.mesh.expert > 1  # in each forward
        is_required = has_collectives or (self.plan.training and evaluation_variants is None)
        if not microbatches and is_required:
            microbatches = [replace(everywhere[0], weight=0.0)]
        return [self._copy_mutated_inputs(move_microbatch(microbatch, device)) for microbatch in microbatches]

    def _copy_mutated_inputs(self, microbatch: MicroBatch) -> MicroBatch:
        """Copy inputs that the model changes in place: they are views of the caller's batch."""
        mutated = self.part.mutated_inputs
        if 0 not in self.part.stages or not any(mutated):
            return microbatch
        pairs = zip(microbatch.inputs, mutated, strict=True)
        copied = [structure.map_tensors(torch.clone, value) if copies else value for value, copies in pairs]
        return replace(microbatch, inputs=copied)


class ActivityHooks(PipelineHooks):
    """Records the current action for fault reports and the memory timeline."""

    def __init__(self, runner: StepRunner, links: Links) -> None:
        self._runner, self._links = runner, links
        self._input_texts: dict[tuple[int, tuple[int, int]], str] = {}

    def use_cuda_graphs(self) -> None:
        """Run the stages as CUDA graphs."""
        runner = self._runner
        device, last = runner.context.torch_device, runner.plan.num_stages - 1
        sums = GradientSums(device)
        forwards: dict[int, StageForward] = {
            index: GraphedForward(
                stage,
                [value for value in stage.parameters() if value.requires_grad and runner.plan.training],
                sums,
                device=device,
                copies_outputs=index < last,
                autocast=functools.partial(autocast_of, runner.plan, device),
            )
            for index, stage in runner.part.stages.items()
        }
        if runner.plan.training:
            self.forwards = forwards
        else:
            self.inference_forwards = forwards

    def on_action(self, action: Action, size: tuple[int, int]) -> None:
        """Record the action."""
        name, memory = _ACTION_NAMES[action.kind], self._runner.memory
        if memory.active:
            memory.note(f"{name} stage {action.stage} micro-batch {action.microbatch}")
        activity.begin(
            name,
            step=self._runner.step_number,
            stage=action.stage,
            microbatch=action.microbatch,
            shapes=self._describe_inputs(action.stage, size),
        )

    def _describe_inputs(self, stage: int, size: tuple[int, int]) -> str:
        """Describe the inputs of a stage; cached."""
        key = stage, size
        if key not in self._input_texts:
            shapes = self._links.shapes(stage - 1, size) if stage else ()
            self._input_texts[key] = describe_shapes(shapes) or f"a batch of {size[1]}"
        return self._input_texts[key]


class TrainingHooks(ActivityHooks):
    """Runs stages in training: random keys, activation checkpointing, DDP or FSDP, gradient all-reduce."""

    def __init__(self, runner: StepRunner) -> None:
        super().__init__(runner, runner.part.links)
        self._keys: list[RandomKey] = []
        self._wrappers, self._all_reduce = runner.sync.wrappers, runner.sync.all_reduce
        axis = runner.sync.data_axis
        self._gathered = axis if isinstance(axis, StepFSDPReplica) else None
        self.forwards: dict[int, StageForward] = {}
        # Recomputed units that communicate must end alike on all workers, and as forecasts count them.
        is_alone = runner.context.num_tensor == runner.plan.mesh.expert == 1 and not runner.plan.shard
        if runner.plan.recompute == "attention" or runner.plan.attention_units:
            names = None if runner.plan.recompute == "attention" else runner.plan.attention_units
            checkpoint_attentions(runner.part.stages.values(), runner.memory.forward, names)
        offload = ActivationOffload(runner.context.torch_device, runner.memory.hold)
        for index, stage in runner.part.stages.items():
            offload_units(stage, offloaded_units(runner.plan, stage.calls), offload)
            checkpoint_units(
                stage, runner.plan.recomputed_units, recompute_context=runner.memory.forward, early_stop=is_alone
            )
            if recomputes_stages(runner.plan):
                self.forwards[index] = CheckpointedForward(
                    stage,
                    policy=runner.plan.recompute,  # type: ignore[arg-type]
                    index=index,
                    num_microbatches=runner.plan.microbatches,
                    recompute_context=runner.memory.forward,
                    wrapper=self._wrappers.get(index),
                )
            elif index in self._wrappers:
                self.forwards[index] = functools.partial(_run_wrapper, self._wrappers[index])

    def begin_step(self, microbatches: list[MicroBatch]) -> None:
        """Set the random keys and the number of micro-batches of a step; gather parameters that stay for a step."""
        runner = self._runner
        self._keys = [
            make_key(
                seed=runner.plan.seed,
                step=runner.step_number,
                first_sample=microbatch.first_sample,
                device=runner.context.torch_device,
            )
            for microbatch in microbatches
        ]
        for forward in self.forwards.values():
            if isinstance(forward, CheckpointedForward):
                forward.num_microbatches = len(microbatches)
        if self._gathered is not None:
            activity.begin("all-gather", step=runner.step_number)
            runner.memory.note("all-gather")
            self._gathered.gather()

    def action_context(self, action: Action) -> AbstractContextManager[Any]:
        """Set the random key, track saved activations, and accumulate gradients without exchanging them."""
        is_forward = action.kind is Kind.FORWARD
        if is_forward:
            set_key(self._keys[action.microbatch])
        memory_context = self._runner.memory.forward() if is_forward else nullcontext()
        zero = self._all_reduce if isinstance(self._all_reduce, GradientReduceScatter) else None
        if zero is not None and action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            return zero.backward(action.stage)
        wrapper = self._wrappers.get(action.stage)
        if wrapper is None or action.microbatch == len(self._keys) - 1:
            return memory_context
        stack = ExitStack()
        stack.enter_context(memory_context)
        stack.enter_context(wrapper.accumulate())
        return stack

    def on_last_backward(self, stage: int) -> None:
        """Let gradient all-reduces overlap with the last backward."""
        if self._all_reduce is not None:
            self._all_reduce.last_backward(stage)

    def on_stage_done(self, stage: int) -> None:
        """Start the gradient all-reduces of a stage."""
        if self._gathered is not None:
            self._gathered.stage_done(stage)
        if self._all_reduce is not None:
            self._all_reduce.stage_done(stage)

    def trained_parameters(self, stage: int) -> Sequence[nn.Parameter] | None:
        """Return the gathered parameters of a stage, if FSDP gathers them for a step."""
        return None if self._gathered is None else self._gathered.trained_parameters(stage)


def _run_wrapper(wrapper: DataParallelReplica, inputs: tuple[Any, ...], microbatch: int) -> tuple[Any, ...]:
    return wrapper(*inputs)  # type: ignore[no-any-return]
