"""The single-device baseline: one step of the plain model on worker 0, over the plan's micro-batches.

The micro-batches are the plan's because batch norm and dropout depend on them; without these the sum over micro-batches
equals the gradient of the full batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stagewright import structure
from stagewright.engine.batch.batch_norm import DeferredBatchNorm, find_tracked_norms
from stagewright.engine.batch.microbatch import MicroBatch
from stagewright.engine.batch.random_key import key_stage, random_key, random_state
from stagewright.engine.parity.relative_error import equal_or_nan
from stagewright.engine.pipeline.link_codec import LINK_DTYPES, FakeLink
from stagewright.graph.capture import capture_fixed
from stagewright.graph.preserve import preserved
from stagewright.graph.stage import Stage
from stagewright.graph.unit_graph import UnitGraph
from stagewright.graph.whole_model import WholeModel
from stagewright.zoo.loss import loss_source
from stagewright.zoo.model import LossSource

_Loss: TypeAlias = Callable[[Any, Any], torch.Tensor]
_Runner: TypeAlias = Callable[[MicroBatch], tuple[Any, Any]]
"""Returns the output and the loss of a micro-batch, with the random state of that micro-batch."""
_ChooseStages: TypeAlias = Callable[[MicroBatch], tuple[UnitGraph, list[Stage]]]


@dataclass(slots=True, kw_only=True)
class Baseline:
    """Loss, gradients, buffers and outputs of one step on a single device."""

    loss: float = 0.0
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """By the model's parameter names; in files if streamed."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """After the step."""
    changed: frozenset[str] = frozenset()
    """Buffers that the step changed: at least one worker must hold each of them."""
    outputs: list[list[torch.Tensor]] = field(default_factory=list)
    """Output tensors of each micro-batch, replica by replica."""
    loss_source: LossSource = "given"
    loss_scale: float = 0.0
    """Scale of the loss: the sum of the micro-batches' absolute losses, which do not cancel."""
    rounding_sensitivity: dict[str, float] = field(default_factory=dict)
    """Relative change of each tensor under a perturbation of rounding size; empty if not measured."""
    is_streamed: bool = False
    """Whether the model ran unit by unit, with weights read from files."""


def make_baseline(
    graph: UnitGraph,
    microbatches: Sequence[MicroBatch],
    loss: _Loss,
    *,
    training: bool,
    seed: int,
    device: torch.device,
    deferred: bool,
    cuts: Sequence[int] = (),
    links: Sequence[tuple[str, str]] = (),
    plain_attention: bool = False,
    perturbation: float = 0.0,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    loss_scale: float = 1.0,
    has_lists: bool = False,
) -> Baseline:
    """Run one step with the plain model on a single device; the model is left unchanged.

    ``links``: for each of the ``cuts``, the codecs of both directions. If there is one, the model runs through its
    graph with quantized activations and gradients at the cuts. ``plain_attention``: where the model draws random
    numbers, use no fused kernels, which draw dropout masks that can't be sharded. ``perturbation``: relative size of a
    perturbation of what crosses the cuts.
    ``autocast``: the context of forward and loss. ``loss_scale``: scale the loss for backward, as the plan does.
    ``has_lists``: the batch has lists of samples, so a graph is captured for each micro-batch.
    """
    model = graph.model
    baseline = Baseline()
    before = _copy_buffers(model)
    buffers: list[tuple[float, dict[str, torch.Tensor]]] = []
    with preserved(model):
        coded = perturbation or any(codec != "none" for link in links for codec in link)
        choose: _ChooseStages | None = None
        is_random = training and _draws_random_numbers(model, microbatches[0], loss, device)
        if coded or is_random:
            choose = _stage_chooser(graph, cuts if coded else (), keyed=training, has_lists=has_lists)
        run = _make_runner(graph, choose, cuts, links, loss, seed, device, perturbation=perturbation)
    with DeferredBatchNorm(model) if deferred and training else nullcontext() as norms:
        for replica in sorted({microbatch.replica for microbatch in microbatches}):
            local = [microbatch for microbatch in microbatches if microbatch.replica == replica]
            with preserved(model):
                for microbatch in local:
                    is_plain = plain_attention and is_random  # in plain matrices, all scores of all layers are held
                    _add_microbatch(baseline, microbatch, run, loss, training, is_plain, autocast, loss_scale)
                buffers.append((sum(microbatch.weight for microbatch in local), _copy_buffers(model)))
        baseline.buffers = average_buffers(buffers, running_statistics(model))
        if norms is not None:  # deferred batch norms update their statistics once, from all replicas
            with preserved(model):
                norms.finish_step()
                after = _copy_buffers(model)
                changed = {name for name, value in after.items() if not bool(equal_or_nan(value, before[name]).all())}
                baseline.buffers |= {name: after[name] for name in changed}
    baseline.changed = find_changed(baseline.buffers, before)
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad / loss_scale if loss_scale != 1 else parameter.grad
            parameter.grad = None
    baseline.gradients = gradients
    return baseline


def find_changed(buffers: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Return the names of the buffers that a step changed or created."""
    return frozenset(
        name
        for name, value in buffers.items()
        if name not in before or value.shape != before[name].shape or not bool(equal_or_nan(value, before[name]).all())
    )


def _add_microbatch(
    baseline: Baseline,
    microbatch: MicroBatch,
    run: _Runner,
    loss: _Loss,
    training: bool,
    plain_attention: bool,
    autocast: Callable[[], AbstractContextManager[Any]],
    loss_scale: float,
) -> None:
    """Run forward and backward of one micro-batch and add its loss and outputs."""
    attention = sdpa_kernel(SDPBackend.MATH) if plain_attention else nullcontext()
    with torch.set_grad_enabled(training), attention:
        with autocast():
            output, value = run(microbatch)
        baseline.loss_source = loss_source(loss, output)
        value = value * microbatch.weight
    if training and value.requires_grad:
        value.backward(torch.full_like(value, loss_scale))
    baseline.loss += float(value.detach())
    baseline.loss_scale += abs(float(value.detach()))
    tensors = structure.tensors(output)
    baseline.outputs.append([tensor.detach().clone() for tensor in tensors])


def _draws_random_numbers(model: nn.Module, microbatch: MicroBatch, loss: _Loss, device: torch.device) -> bool:
    """Run a micro-batch and return whether the model or its loss draws random numbers."""
    before = random_state(device)
    with torch.no_grad():
        args, kwargs = _clone((microbatch.args, microbatch.kwargs))
        loss(model(*args, **kwargs), microbatch.target)
    return random_state(device) != before


def _stage_chooser(graph: UnitGraph, cuts: Sequence[int], *, keyed: bool, has_lists: bool) -> _ChooseStages:
    """Return a function that gives the stages to run a micro-batch with, and their graph."""
    known: dict[Any, tuple[UnitGraph, list[Stage]]] = {}

    def choose(microbatch: MicroBatch) -> tuple[UnitGraph, list[Stage]]:
        key: Any = None
        chosen = graph
        if has_lists and not isinstance(graph, WholeModel):
            tensors = structure.tensors((microbatch.args, microbatch.kwargs))
            key = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if key not in known:
            if key is not None:
                units = sorted({call.target for call in graph.calls})
                chosen = capture_fixed(graph.model, microbatch.args, microbatch.kwargs, units, microbatch.num_samples)
            known[key] = chosen, chosen.stages(cuts)
            for stage in known[key][1] if keyed else ():
                key_stage(stage)
        return known[key]

    return choose


def _make_runner(
    graph: UnitGraph,
    choose: _ChooseStages | None,
    cuts: Sequence[int],
    links: Sequence[tuple[str, str]],
    loss: _Loss,
    seed: int,
    device: torch.device,
    *,
    perturbation: float,
) -> _Runner:
    """Run the plain model, or its stages if they are chosen, with keyed random numbers and the codecs of the links."""

    def cross(values: Sequence[Any], cut: int, coded: Sequence[bool]) -> list[Any]:
        return [
            FakeLink.apply(value, *links[cut], perturbation) if is_coded and value.dtype in LINK_DTYPES else value  # type: ignore[no-untyped-call]
            for value, is_coded in zip(values, coded, strict=True)
        ]

    def run(microbatch: MicroBatch) -> tuple[Any, Any]:
        # Even if nothing is drawn, batch norms tell micro-batches apart by the key.
        with random_key(seed=seed, step=0, first_sample=microbatch.first_sample, device=device):
            args, kwargs = _clone((microbatch.args, microbatch.kwargs))
            if choose is None:
                with _padding_computed(graph.model):
                    output = graph.model(*args, **kwargs)
            else:
                chosen, stages = choose(microbatch)
                values: Sequence[Any] = chosen.flatten(args, kwargs)
                for index, stage in enumerate(stages):
                    values = stage(*values)
                    if index < len(stages) - 1:
                        values = cross(values, index, chosen.needs_gradient(cuts[index]))
                output = chosen.unflatten(values)
            return output, loss(output, microbatch.target)

    return run


@contextmanager
def _padding_computed(model: nn.Module) -> Iterator[None]:
    """Compute padded positions in torch's encoders too, as captured stages and compiled models do.

    In inference, ``nn.TransformerEncoder`` may skip them and return zeros there.
    """
    encoders = [module for module in model.modules() if getattr(module, "use_nested_tensor", None) is True]
    for encoder in encoders:
        encoder.use_nested_tensor = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for encoder in encoders:
            encoder.use_nested_tensor = True  # type: ignore[assignment]


def running_statistics(model: nn.Module) -> set[str]:
    """Return the names of batch norms' running statistics, which are averaged over replicas."""
    norms = {id(norm) for norm in find_tracked_norms(model)}
    names = [name for name, module in model.named_modules() if id(module) in norms]
    return {f"{name}.{kind}".lstrip(".") for name in names for kind in ("running_mean", "running_var")}


def average_buffers(
    buffers: list[tuple[float, dict[str, torch.Tensor]]], averaged: set[str]
) -> dict[str, torch.Tensor]:
    """Average running statistics over replicas by weight; take all other buffers from replica 0."""
    if len(buffers) == 1:
        return buffers[0][1]
    total = sum(weight for weight, _ in buffers)
    return {
        name: sum(weight / total * values[name].double() for weight, values in buffers).to(value.dtype)  # type: ignore[union-attr]
        if name in averaged
        else value
        for name, value in buffers[0][1].items()
    }


def _clone(value: Any) -> Any:
    """Clone inputs, because the model may change them in place."""
    return structure.map_tensors(torch.clone, value)


def _copy_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_buffers()}
