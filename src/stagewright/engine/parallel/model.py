"""Load and capture a plan's model, and find its cuts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from stagewright import structure
from stagewright.engine.batch.precision import autocast_of
from stagewright.engine.tensor.apply import divides_regions, modules_to_keep_whole, plan_tensor_parallel
from stagewright.engine.worker.context import WorkerContext
from stagewright.errors import CaptureError, UnknownName, UsageError
from stagewright.graph.attention.structure import find_attentions
from stagewright.graph.capture import capture, capture_fixed
from stagewright.graph.unit_graph import UnitGraph
from stagewright.graph.whole_model import WholeModel
from stagewright.sample_lists import BatchDims
from stagewright.spec.activation_checkpointing import check_recomputed_units, no_attention
from stagewright.spec.plan import Plan
from stagewright.zoo.model import Batch, Model

CAPTURED_SAMPLES = 4  # enough to tell the batch dimension from others, cheap for a batch of thousands


def load_model(
    plan: Plan,
    context: WorkerContext,
    *,
    hollow: bool = False,
    checkpoint: Path | None = None,
    dtype: str | None = None,
) -> Model:
    """Load the plan's model with a batch of the plan's size, in train or eval mode, on this worker's device.

    ``hollow``: leave weights that come from files there, for ``ModelPart`` to read; ``checkpoint``: a folder with other
    files of the same names; ``dtype``: of the parameters, instead of the plan's.
    """
    model = plan.model.load(batch=plan.batch, dtype=dtype or plan.dtype, hollow=hollow, checkpoint=checkpoint)
    model.module.train(plan.training)
    return model.to(context.torch_device, plan.memory_bytes)


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on a device."""
    args, kwargs, target = structure.map_tensors(lambda leaf: leaf.to(device), (batch.args, batch.kwargs, batch.target))
    return Batch(args=args, kwargs=kwargs, target=target)


def cut_indices(graph: UnitGraph, names: Sequence[str]) -> list[int]:
    """Return the indices of named cuts among a graph's unit calls."""
    index_of = {call.name: call.index for call in graph.calls[:-1]}
    for name in names:
        if name not in index_of:
            raise UnknownName("cut", name, index_of, "(a cut is named by the unit before it)")
    indices = [index_of[name] for name in names]
    if indices != sorted(set(indices)):
        raise UsageError(f"cuts {list(names)} are not in the order of the model")
    return indices


def check_recomputation(plan: Plan, graph: UnitGraph) -> None:
    """Raise UsageError unless the model has the units, or the attention, that the plan recomputes."""
    check_recomputed_units(plan, (call.name for call in graph.calls))
    calls = [call for call in graph.calls if plan.recompute == "attention" or call.name in plan.attention_units]
    if calls and not any(find_attentions(graph.module(call)) for call in calls):
        raise no_attention(plan.model.name)


def capture_for(plan: Plan, model: Model) -> UnitGraph:
    """Capture a model with the plan's units.

    Captures a few samples if the graph then works for any batch size. Automatically chosen units are no finer than the
    regions that tensor-parallel workers split.
    """
    if plan.training:
        _reject_sparse_embeddings(model.module)
    if plan.num_stages == 1 and plan.mesh.size("tensor") == 1 and input_dims(model).lists:
        return _as_whole(model, "a graph is captured for one number of items of a list of samples, and their shapes")
    units = plan.units if plan.units in ("auto", "leaf") else [name.strip() for name in plan.units.split(",")]
    with autocast_of(plan, example_device(model)):  # the dtypes of crossings are those of autocast
        try:
            graph = _capture(model, units)
        except CaptureError as error:
            if plan.num_stages > 1 or plan.mesh.size("tensor") > 1:
                raise _suggest_uncut(error, plan) from error
            return _as_whole(model, str(error))
        if plan.mesh.tensor > 1 and units == "auto":
            return _keep_regions_whole(plan, model, graph)
    return graph


def _keep_regions_whole(plan: Plan, model: Model, graph: UnitGraph) -> UnitGraph:
    """Return a graph whose units hold whole tensor-parallel regions; without stages that may be the whole model."""
    degrees = sorted(set(plan.mesh.degrees) - {1})
    plans = [plan_tensor_parallel(model.module, degree) for degree in degrees]
    targets = [call.target for call in graph.calls]
    whole_modules = list(dict.fromkeys(name for regions in plans for name in modules_to_keep_whole(regions, targets)))
    if whole_modules:
        return _capture(model, whole_modules)
    if plan.num_stages == 1 and any(divides_regions(regions, targets) for regions in plans):
        return _as_whole(model, "tensor parallelism splits layers of several units together")
    return graph


def example_device(model: Model) -> torch.device:
    """Return the device of a model's example batch."""
    leaves = structure.leaves((model.args, model.kwargs))
    devices = [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return devices[0] if devices else torch.device("cpu")


def _suggest_uncut(error: CaptureError, plan: Plan) -> CaptureError:
    return CaptureError(f"{error}; or run it without a cut: data={plan.mesh.num_workers}, with or without FSDP")


def _as_whole(model: Model, reason: str) -> WholeModel:
    """Return a model that can't be captured as a single unit."""
    return WholeModel(model.module, model.args, model.kwargs, batch_dims=input_dims(model), reason=reason)


def input_dims(model: Model) -> BatchDims:
    """Return where the arguments of a model have their samples."""
    return BatchDims.find(*((example.args, example.kwargs) for example in (model.example(2), model.example(3))))


def _capture(model: Model, units: str | list[str]) -> UnitGraph:
    if input_dims(model).lists:
        return capture_fixed(model.module, model.args, model.kwargs, units, model.batch_size)
    if model.batch_size > CAPTURED_SAMPLES:
        small_batch = move_batch(model.example(CAPTURED_SAMPLES), example_device(model))
        try:
            graph = capture(model.module, small_batch.args, small_batch.kwargs, units)
        except CaptureError as error:
            if not isinstance(error.__cause__, IndexError):
                raise
        else:
            if graph.dynamic:
                return graph
        # Rows that others refer to, as the nodes of a graph, are needed all.
    return capture(model.module, model.args, model.kwargs, units)


def _reject_sparse_embeddings(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise UsageError(
                f"{name} is an embedding with sparse=True, but gradients are all-reduced and compared as dense "
                "tensors; build it with sparse=False"
            )
