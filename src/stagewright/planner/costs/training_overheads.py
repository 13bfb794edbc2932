"""Measured costs of a training step apart from the units: loss, optimizer step, gradient accumulation, batch norm."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stagewright import structure
from stagewright.engine.batch.batch_norm import find_tracked_norms
from stagewright.engine.data.data_parallel import DataParallelReplica
from stagewright.engine.parallel.optimizer import make_optimizer
from stagewright.graph.unit_graph import UnitGraph
from stagewright.machine import cpu_offload
from stagewright.profiler.replay import peak_memory_increase
from stagewright.profiler.storage import model_storages, storage_of
from stagewright.simulator.costs.overheads import ModelOverheads
from stagewright.spec.plan import Plan
from stagewright.zoo.model import Model


def measure_training_overheads(
    graph: UnitGraph, model: Model, plan: Plan, repeats: int, device: torch.device
) -> ModelOverheads:
    """Measure the overheads of training, each the median of `repeats` rounds."""
    parameters = _trainable_parameters(model.module, device, plan.memory_bytes)
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    with torch.no_grad(), cpu_offload.offloaded(model.module, device):
        output = graph(*model.args, **model.kwargs)
    loss_forward, loss_backward, loss_saved = _measure_loss(model, output, repeats)
    loss_working = _loss_working_bytes(model, output) if device.type == "cuda" else (0, 0)
    del output
    _set_gradients(parameters)
    accumulate = statistics.median([_accumulate_s(parameters) for _ in range(repeats + 1)][1:])
    optimizer_step, optimizer_working = _measure_optimizer(model, plan, parameters, repeats, device)
    replica = _SingleReplica(model.module)
    averages = [_seconds(lambda: replica.synchronize(1.0), device) for _ in range(repeats + 1)]
    return ModelOverheads(
        loss_forward_s=loss_forward,
        loss_backward_s=loss_backward,
        loss_kept_bytes=loss_saved,
        optimizer_s_per_byte=optimizer_step / num_bytes,
        accumulate_s_per_byte=accumulate / num_bytes,
        loss_forward_working_bytes=loss_working[0],
        loss_backward_working_bytes=loss_working[1],
        optimizer_working_share=optimizer_working / num_bytes,
        workspace_bytes=workspace_bytes(device),
        statistics_s=statistics.median(averages[1:]) if replica.num_bytes else 0.0,
        statistics_bytes=replica.num_bytes,
    )


def workspace_bytes(device: torch.device) -> int:
    """Measure the memory held by matrix libraries; they allocate it again when needed."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if device.type != "cuda" or clear is None:
        return 0
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    clear()
    return int(before - torch.cuda.memory_allocated(device))


def _trainable_parameters(
    module: torch.nn.Module, device: torch.device, limit_bytes: int | None
) -> list[torch.nn.Parameter]:
    """Return the trainable parameters; for an offloaded model, copies of as many as fit on the device.

    The optimizer step and gradient accumulation are measured per byte.
    """
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not cpu_offload.is_offloaded(module, device):
        return trainable
    # Leave room for gradients, optimizer states and temporary memory.
    remaining = cpu_offload.room_of(device, limit_bytes) // (2 * cpu_offload.ROOM)
    selected: list[torch.nn.Parameter] = []
    for parameter in trainable:
        num_bytes = parameter.numel() * parameter.element_size()
        if num_bytes <= remaining:
            selected.append(parameter)
            remaining -= num_bytes
    selected = selected or [min(trainable, key=torch.Tensor.numel)]
    return [torch.nn.Parameter(parameter.detach().to(device)) for parameter in selected]


def _set_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)


def _measure_optimizer(
    model: Model, plan: Plan, parameters: Sequence[torch.nn.Parameter], repeats: int, device: torch.device
) -> tuple[float, int]:
    """Measure the optimizer step and its temporary memory."""
    optimizer = make_optimizer(dataclasses.replace(plan.optimizer, learning_rate=1e-12), list(parameters))

    def step() -> None:
        optimizer.step()
        for parameter in model.module.parameters():  # like the engine, which iterates over all modules
            parameter.grad = None

    seconds = []
    for _ in range(repeats + 1):
        _set_gradients(parameters)
        seconds.append(_seconds(step, device))
    working = 0
    if device.type == "cuda":
        _set_gradients(parameters)
        working = peak_memory_increase(optimizer.step, device)[1]
    for parameter in parameters:
        parameter.grad = None
    alone_s = statistics.median(seconds[1:])
    if device.type != "cuda" or cpu_offload.is_offloaded(model.module, device):
        return alone_s, working
    try:
        return min(alone_s, _step_after_backward_s(model, optimizer, repeats, device)), working
    except torch.OutOfMemoryError:  # a part of the model may fit where the whole does not
        return alone_s, working
    finally:
        model.module.zero_grad()


def _step_after_backward_s(model: Model, optimizer: torch.optim.Optimizer, repeats: int, device: torch.device) -> float:
    """Measure what an optimizer step adds to a training step: it is launched while backward still runs."""

    def train(*, steps: bool) -> None:
        torch.autograd.backward([model.loss(model.module(*model.args, **model.kwargs), model.target)])
        if steps:
            optimizer.step()
        model.module.zero_grad()

    added = []
    with torch.enable_grad():
        for _ in range(repeats + 1):
            without_s, with_s = (_seconds(lambda: train(steps=steps), device) for steps in (False, True))  # noqa: B023
            added.append(with_s - without_s)
    return max(0.0, statistics.median(added[1:]))


class _SingleReplica(DataParallelReplica):
    """A replica without peers: averages batch norm's running statistics locally and counts their bytes."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.num_bytes = module, 0
        self._norms = find_tracked_norms(module)

    def all_reduce(self, value: torch.Tensor, op: Any = None) -> torch.Tensor:
        self.num_bytes = value.nbytes
        return value


def _loss_inputs(output: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return the output detached from the model, and its tensors that get gradients."""
    detached = structure.map_tensors(lambda leaf: leaf.detach().requires_grad_(leaf.is_floating_point()), output)
    leaves = structure.tensors(detached)
    return detached, [leaf for leaf in leaves if leaf.requires_grad]


def _loss_working_bytes(model: Model, output: Any) -> tuple[int, int]:
    """Measure the temporary memory of the loss forward and backward on CUDA."""
    detached, inputs = _loss_inputs(output)
    device = inputs[0].device
    with torch.enable_grad():
        loss, forward = peak_memory_increase(lambda: model.loss(detached, model.target), device)
        if not loss.requires_grad:
            return forward, 0
        _, backward = peak_memory_increase(lambda: torch.autograd.grad(loss, inputs, allow_unused=True), device)
    return forward, backward


def _measure_loss(model: Model, output: Any, repeats: int) -> tuple[float, float, int]:
    """Measure the loss forward and backward, and the bytes it saves."""
    saved_bytes = _loss_saved_bytes(model, output)
    forward, backward = [], []
    for _ in range(repeats + 1):
        detached, inputs = _loss_inputs(output)
        leaves = structure.tensors(detached)
        device = leaves[0].device if leaves else None
        losses: list[torch.Tensor] = []
        with torch.enable_grad():
            forward.append(_seconds(lambda: losses.append(model.loss(detached, model.target)), device))  # noqa: B023
            if losses[0].requires_grad:
                backward.append(
                    _seconds(lambda: torch.autograd.grad(losses[0], inputs, allow_unused=True), device)  # noqa: B023
                )
    return statistics.median(forward[1:]), statistics.median(backward[1:] or [0.0]), saved_bytes


def _loss_saved_bytes(model: Model, output: Any) -> int:
    """Return the bytes that the loss saves for backward, without the model's parameters and buffers."""
    excluded = model_storages(model.module)
    sizes: dict[Any, int] = {}
    alive: list[object] = []  # keeps storages from being reused at the same address

    def save(tensor: torch.Tensor) -> None:  # a result that its own operation saves would never be freed
        key, num_bytes, storage = storage_of(tensor)
        if num_bytes and key not in excluded:
            sizes[key] = num_bytes
            alive.append(storage)

    def restore(_: None) -> torch.Tensor:
        raise AssertionError("this run has no backward pass")

    detached, _ = _loss_inputs(output)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(save, restore):
        model.loss(detached, model.target)
    return sum(sizes.values())


def _accumulate_s(parameters: Sequence[torch.nn.Parameter]) -> float:
    """Measure gradient accumulation.

    On a CPU each gradient is added right after it is made, as in backward, while it is still in a cache. On a GPU all
    are added at once, because a single one is too short to time.
    """
    device = parameters[0].device
    total_s = 0.0
    for group in [[parameter] for parameter in parameters] if device.type == "cpu" else [parameters]:
        pairs = [(parameter.grad, torch.zeros_like(parameter)) for parameter in group]
        total_s += _seconds(lambda: [old.add_(new) for old, new in pairs if old is not None], device)  # noqa: B023
    return total_s


def _seconds(call: Callable[[], object], device: torch.device | None) -> float:
    on_cuda = device is not None and device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if on_cuda:
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
