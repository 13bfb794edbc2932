"""The part of the model that one worker holds under a plan: its stages, their parameters, gradients and buffers.

plan + model ─► capture ─► cuts ─► (tensor, expert parallelism) ─► stages of this worker ─► free the rest, or read
this part
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from stagewright.engine.batch.batch_norm import check_split_norms
from stagewright.engine.context.apply import apply_context_parallel
from stagewright.engine.context.axis import ContextAxis
from stagewright.engine.context.find import find_blocks
from stagewright.engine.context.sources import Sources
from stagewright.engine.data.gradient_allreduce import tied_weight_holders
from stagewright.engine.data.parameter_shards import ParameterShards
from stagewright.engine.expert.apply import apply_expert_parallel, expert_parameters, plan_expert_parallel
from stagewright.engine.expert.axis import ExpertAxis
from stagewright.engine.parallel.compilation import check_recordable, choose_compile_mode
from stagewright.engine.parallel.model import capture_for, check_recomputation, cut_indices, input_dims
from stagewright.engine.parallel.shape_variants import ShapeVariants
from stagewright.engine.pipeline.activation_checkpointing import find_mutated_inputs
from stagewright.engine.state.full_state import LazyTensors, full_tensors
from stagewright.engine.tensor.apply import apply_tensor_parallel, plan_tensor_parallel, require_whole_regions
from stagewright.engine.tensor.axis import Axis, TensorAxis
from stagewright.engine.tensor.layers import shard_layouts
from stagewright.engine.tensor.sequence_plan import plan_sequence_parallel
from stagewright.engine.tensor.sequence_stage import divide_stage
from stagewright.engine.weight_gradients.in_pieces import compute_in_pieces
from stagewright.engine.worker.context import WorkerContext
from stagewright.engine.worker.memory import MemoryTracker
from stagewright.errors import UsageError
from stagewright.graph.stage import Stage
from stagewright.graph.unit_graph import UnitGraph
from stagewright.machine.hollow import copy_hollow
from stagewright.spec.plan import Plan
from stagewright.spec.searched_order import splits_backward
from stagewright.zoo.model import Model


class ModelPart:
    """The stages of one worker."""

    def __init__(self, plan: Plan, model: Model, context: WorkerContext, graph: UnitGraph | None = None) -> None:
        self.plan, self.model, self.context = plan, model, context
        self.graph = graph or capture_for(plan, model)
        self.cuts = cut_indices(self.graph, plan.cuts)
        check_recomputation(plan, self.graph)
        if len(self.cuts) + 1 != plan.num_stages:
            raise UsageError(
                f"the plan names {len(self.cuts)} cuts for {plan.num_stages} stages; name {plan.num_stages - 1}"
            )
        self.stage_workers = plan.stage_workers
        self.variants = ShapeVariants(
            self.graph, self.cuts, copy_hollow(model.module), lists=input_dims(model).lists, has_codecs=plan.has_codecs
        )
        self.links = self.variants.links
        self.memory = MemoryTracker(worker=context.rank, device=context.torch_device, limit_bytes=plan.memory_bytes)
        # While the model is whole: a tensor-parallel shard is another tensor.
        self._first_names = first_names(model.module.named_parameters(remove_duplicate=False))
        self.compile_mode, self.compile_reason = choose_compile_mode(plan, model, self.graph, context.torch_device)
        """What is compiled, and why that differs from the plan."""
        check_recordable(plan, model, self.graph, context.torch_device)
        self.tensor_axis: TensorAxis | None = None
        self.replicated = ""
        """Why tensor parallel workers all compute some layers; "" if there are none."""
        self._partial: frozenset[str] = frozenset()
        self._sequence_parts: dict[str, int] = {}
        if plan.mesh.tensor_degrees:
            self._check_tensor_degrees()
        if plan.mesh.context == 1 and context.num_tensor > 1:  # captured graphs keep calling the same modules
            gc.collect()  # a dead autograd graph of capture would keep the gradient shape of a whole weight
            regions = plan_tensor_parallel(model.module, context.num_tensor, vocab_parallel=plan.vocab_parallel)
            self.replicated = regions.replicated
            require_whole_regions(regions, [call.target for call in self.graph.calls])
            sequence = None
            if plan.sequence_parallel:
                stages = self.graph.stages(self.cuts)
                sequence = plan_sequence_parallel(model.module, regions.regions, stages, context.num_tensor)
                self._partial, self.replicated = sequence.partial, self.replicated or sequence.whole
                self._sequence_parts = sequence.parts
            self.tensor_axis = apply_tensor_parallel(
                model.module,
                context.tensor_group,
                plan=regions,
                gather_logits=self.compile_mode != "none",
                sequence=sequence,
            )
        self.context_axis: ContextAxis | None = None
        self._blocks: dict[str, Sources] = {}
        if plan.mesh.context > 1:
            self._blocks = find_blocks(self.graph, model.args, model.kwargs, plan.mesh.context)
            self.context_axis = apply_context_parallel(
                model.module, self._blocks, context.tensor_group, plan.context_attention
            )
        self.expert_axis: ExpertAxis | None = None
        if plan.mesh.expert > 1:
            experts = plan_expert_parallel(model.module, plan.mesh.expert)
            # Replicas of one stage start from the weights of the first one, unless they read them from files.
            is_wrapped = plan.num_stages == 1 and plan.training and model.weights is None
            self.expert_axis = apply_expert_parallel(
                model.module,
                context.expert_group,
                plans=experts,
                source_group=context.data_group if is_wrapped else None,
            )
        self.expert_parameters = expert_parameters(model.module)
        """Parameters that are divided over the expert axis, by identity."""
        all_stages = self.graph.stages(self.cuts)
        self.stages: dict[int, Stage] = {
            index: stage for index, stage in enumerate(all_stages) if self.stage_workers[index] == context.pipeline
        }
        for stage in self.stages.values():
            self.divide_sequences(stage)
        self.variants.follow(self.stages, self.divide_sequences)
        if plan.training:
            check_split_norms(model.module, all_stages, self.stage_workers, deferred=plan.batch_norm == "deferred")
        self.mutated_inputs = find_mutated_inputs(all_stages[0])
        """For each model input, whether the first stage changes it in place."""
        self.stage_parameters = [_trainable(stage) for stage in all_stages]
        """The trainable parameters of every stage, of other workers too."""
        self.stage_names = [self._trainable_names(stage) for stage in all_stages]
        """Their names in the model."""
        self.module = nn.ModuleList(self.stages.values())
        is_eager = self.compile_mode == "none" and not splits_backward(plan, context.pipeline)
        if plan.training and is_eager and context.torch_device.type == "cpu":
            compute_in_pieces(self.module)
        self.shards: ParameterShards | None = None
        """This replica's shards of the parameters, with ZeRO."""
        self._parameter_tables: list[dict[str, nn.Parameter | None]] | None = None
        self._free_other_parameters()
        if not plan.shard:  # FSDP2 moves parameters to the device itself, unit by unit
            with self.memory.explain_oom():
                self.module.to(context.torch_device)
                self.read_weights(self.module)

    def divide_sequences(self, stage: Stage) -> None:
        """Divide the sequences between the units of a stage that was built from a graph of this part's model."""
        if self._sequence_parts:
            assert self.tensor_axis is not None
            divide_stage(stage, self._sequence_parts, self.tensor_axis)

    def _check_tensor_degrees(self) -> None:
        """Refuse, on every worker, what some stage's tensor degree can't divide, or two stages would divide unlike."""
        mesh, module = self.plan.mesh, self.model.module
        names = [set(self._trainable_names(stage)) for stage in self.graph.stages(self.cuts)]
        tied = tied_weight_holders(names, self.stage_workers)
        for degree in sorted(set(mesh.degrees) - {1}):
            regions = plan_tensor_parallel(module, degree)
            require_whole_regions(regions, [call.target for call in self.graph.calls])
            divided = {f"{layer}.weight" for region in regions.regions for layer, _ in region.layers()}
            for name in sorted(divided & tied.keys()):
                if len({mesh.degrees[worker] for worker in tied[name]}) > 1:
                    raise UsageError(
                        f"{name} is a weight of stages with different tensor degrees in {mesh}, and each would divide "
                        f"it in its own way: use one degree, like tensor = {mesh.tensor}"
                    )

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that this worker trains, by their names in the model."""
        names = self.parameter_names()
        return {names[id(parameter)]: parameter for parameter in _trainable(self.module)}

    def optimizer_parameters(self) -> dict[str, nn.Parameter]:
        """Return what this worker's optimizer steps, by names in the model: its shards with ZeRO."""
        parameters = self.trainable_parameters()
        if self.shards is None:
            return parameters
        return {name: self.shards.shard(parameter) for name, parameter in parameters.items()}

    def divided_parameters(self) -> list[nn.Parameter]:
        """Return what this worker's optimizer steps and of which it has the gradient of its own tokens only."""
        blocks = tuple(f"{block}." for block in self._blocks)
        parameters = self.optimizer_parameters().items()
        return [value for name, value in parameters if name in self._partial or (blocks and name.startswith(blocks))]

    @property
    def sequence_axis(self) -> Axis | None:
        """The axis over which sequences are divided: the context axis, or the tensor axis with sequence parallelism."""
        return self.tensor_axis if self._partial else self.context_axis

    def full_gradients(self, *, lazily: bool = False) -> Mapping[str, torch.Tensor]:
        """Gather the full gradients of this worker's parameters, by their names in the model.

        ``lazily``: each when it is looked up, which all workers then do in the same order.
        """
        full, gradients = self.trainable_parameters(), {}
        for name, parameter in self.optimizer_parameters().items():
            if parameter.grad is not None:
                gradient = parameter.grad
                gradients[name] = gradient if self.shards is None else self.shards.distributed(full[name], gradient)
        host = torch.device("cpu")
        return (LazyTensors if lazily else full_tensors)(self.model.module, gradients, host)

    def full_buffers(self) -> dict[str, torch.Tensor]:
        """Gather the full buffers of this worker's stages, such as the statistics of divided channels."""
        return full_tensors(self.model.module, self.buffers())

    def zero_gradients(self) -> None:
        """Drop all gradients."""
        # A GPU waits for the host meanwhile, so modules are not walked in each step.
        if self._parameter_tables is None:
            self._parameter_tables = [module._parameters for module in self.module.modules() if module._parameters]
        for table in self._parameter_tables:
            for parameter in table.values():
                if parameter is not None:
                    parameter.grad = None
        if self.shards is not None:
            for parameter in self.optimizer_parameters().values():
                parameter.grad = None

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers of this worker's stages, by their first names in the model."""
        names = first_names(self.model.module.named_buffers(remove_duplicate=False))
        return {
            names.get(name, name): value
            for stage in self.stages.values()
            for name, value in stage.named_buffers()
            if "stagewright_" not in name
        }

    def parameter_names(self) -> dict[int, str]:
        """Return the first name in the model of each parameter, by id."""
        names: dict[int, str] = {}
        for stage in self.stages.values():
            for name, parameter in stage.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), self._first_names.get(name, name))
        return names

    def _trainable_names(self, stage: Stage) -> list[str]:
        named = stage.named_parameters(remove_duplicate=False)
        names = [self._first_names.get(name, name) for name, parameter in named if parameter.requires_grad]
        return list(dict.fromkeys(names))

    def read_weights(self, module: nn.Module) -> None:
        """Read the parameters of a module of this part, if the model was loaded without."""
        if self.model.weights is None:
            return
        names = self.parameter_names()
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):  # of a unit that FSDP2 has sharded
                parameter.data = self.read_weight(names[id(parameter)], parameter)

    def read_weight(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """Read what this worker holds of a parameter from the files of a model that was loaded without weights."""
        assert self.model.weights is not None
        layout = shard_layouts(self.model.module).get(name)
        value = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        self.model.weights.read(name, value, None if layout is None else layout.part(parameter))
        return value

    def _free_other_parameters(self) -> None:
        """Free the parameters of other workers."""
        held = {id(parameter) for parameter in self.module.parameters()}
        with torch.no_grad():
            for parameter in self.model.module.parameters():
                if id(parameter) not in held:
                    parameter.data = parameter.data.new_empty(0)


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def first_names(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Map each name of a tensor to the first of its names."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors}
