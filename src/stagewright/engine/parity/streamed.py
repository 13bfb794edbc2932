"""The streamed baseline: one step of the plain model unit by unit, for a model that is too large to be held whole.

    forward     unit 0   unit 1   …   unit n-1        weights of one unit at a time, read from their files
                   │        │              │
                   ▼        ▼              ▼          kept: what crosses from unit to unit, for every micro-batch
    backward    unit 0 ◄─ unit 1 ◄─ … ◄─ unit n-1     each unit runs forward again, then backward
                   │        │              │
                   ▼        ▼              ▼
                files of gradients                    read one by one for the comparison

A unit runs all micro-batches before the next one begins, so its weights are read twice in a step. Random numbers are
keyed, so the second forward draws those of the first. A gradient is written as soon as no earlier unit adds to it;
tied weights wait for the first unit that uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stagewright import structure
from stagewright.engine.batch.microbatch import MicroBatch
from stagewright.engine.batch.random_key import key_stage, random_key
from stagewright.engine.parity.baseline import Baseline, average_buffers, find_changed, running_statistics
from stagewright.engine.parity.relative_error import equal_or_nan
from stagewright.engine.parity.spooled_tensors import SpooledTensors
from stagewright.graph.preserve import preserved
from stagewright.graph.stage import Stage
from stagewright.graph.unit_graph import UnitGraph
from stagewright.zoo.loss import loss_source
from stagewright.zoo.weight_files import WeightFiles

_Buffers = dict[str, torch.Tensor]


def stream_baseline(
    graph: UnitGraph,
    weights: WeightFiles,
    microbatches: Sequence[MicroBatch],
    loss: Callable[[Any, Any], torch.Tensor],
    folder: Path,
    *,
    training: bool,
    seed: int,
    device: torch.device,
    plain_attention: bool = False,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    loss_scale: float = 1.0,
) -> Baseline:
    """Run one step of a hollow model on a single device, unit by unit; gradients are written to ``folder``.

    The other arguments are those of ``make_baseline``.
    """
    stream = _Stream(graph, weights, microbatches, seed=seed, device=device, training=training)
    stream.attention = (lambda: sdpa_kernel(SDPBackend.MATH)) if plain_attention and training else nullcontext
    stream.autocast = autocast
    gradients = SpooledTensors(folder)
    baseline = Baseline(gradients=gradients, is_streamed=True)
    before = {name: value.detach().clone() for name, value in graph.model.named_buffers()}
    with preserved(graph.model):
        for index in range(len(stream.stages) - 1):
            stream.forward(index)
        stream.finish(baseline, loss, loss_scale, gradients)
        for index in reversed(range(len(stream.stages) - 1)) if training else ():
            stream.backward(index)
            stream.write_gradients(index, gradients, loss_scale)
    baseline.buffers = before | average_buffers(stream.buffers_of_replicas(before), running_statistics(graph.model))
    baseline.changed = find_changed(baseline.buffers, before)
    return baseline


class _Stream:
    """The units of a model, and what is kept between them."""

    attention: Callable[[], AbstractContextManager[Any]] = nullcontext
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __init__(
        self,
        graph: UnitGraph,
        weights: WeightFiles,
        microbatches: Sequence[MicroBatch],
        *,
        seed: int,
        device: torch.device,
        training: bool,
    ) -> None:
        self._graph, self._weights, self._microbatches = graph, weights, microbatches
        self._seed, self._device, self._training = seed, device, training
        cuts = range(len(graph.calls) - 1)
        self.stages: list[Stage] = graph.stages(cuts)
        if training:
            for stage in self.stages:
                key_stage(stage)
        self._needs_gradient: list[tuple[bool, ...]] = [graph.needs_gradient(cut) for cut in cuts]
        inputs: list[Sequence[Any]] = [graph.flatten(*_clone((part.args, part.kwargs))) for part in microbatches]
        self._inputs: list[list[Sequence[Any]]] = [inputs]
        """By unit and micro-batch: what the unit receives."""
        self._gradients: list[Sequence[torch.Tensor | None]] = [() for _ in microbatches]
        """By micro-batch: the gradients of the outputs of the unit that comes next in backward."""
        self._states: list[list[_Buffers]] = []
        """By unit and micro-batch: the buffers before forward; unchanged ones are shared."""
        self._final: list[dict[int, _Buffers]] = []
        """By unit and replica: the buffers after forward."""
        self._names = {id(parameter): name for name, parameter in graph.model.named_parameters()}
        self._first_users: dict[int, int] = {}
        for index, stage in enumerate(self.stages):
            for parameter in stage.parameters():
                self._first_users.setdefault(id(parameter), index)

    def forward(self, index: int) -> None:
        """Run a unit without gradients, for every micro-batch."""
        sent: list[Sequence[Any]] = []
        with torch.no_grad(), self._loaded(index):
            for number, _ in self._in_order(index):
                received = self._inputs[index][number]
                copies = _clone(received)
                outputs = self._run(index, number, copies)
                sent.append(_share_unchanged(outputs, copies, received))
        self._inputs.append(sent)

    def finish(
        self, baseline: Baseline, loss: Callable[[Any, Any], torch.Tensor], loss_scale: float, gradients: SpooledTensors
    ) -> None:
        """Run the last unit with the loss, and its backward; add loss and outputs to the baseline."""
        index = len(self.stages) - 1
        with torch.set_grad_enabled(self._training), self._loaded(index):
            for number, microbatch in self._in_order(index):
                leaves = self._leaves(index, number)
                with self._key(microbatch), self.attention(), self.autocast():
                    output = self._graph.unflatten(self.stages[index](*leaves))
                    value = loss(output, microbatch.target)
                baseline.loss_source = loss_source(loss, output)
                value = value * microbatch.weight
                if self._training and value.requires_grad:
                    with self.attention():
                        torch.autograd.backward([value], [torch.full_like(value, loss_scale)])
                self._gradients[number] = [_gradient(leaf) for leaf in leaves]
                baseline.loss += float(value.detach())
                baseline.loss_scale += abs(float(value.detach()))
                baseline.outputs.append([tensor.detach().clone() for tensor in structure.tensors(output)])
        self._inputs.pop()
        if self._training:
            self.write_gradients(index, gradients, loss_scale)

    def backward(self, index: int) -> None:
        """Run a unit again with gradients, then backward, for every micro-batch; drop what it received."""
        received = self._inputs[index]
        with torch.enable_grad(), self._loaded(index):
            for number in range(len(self._microbatches)):
                self._restore(index, self._states[index][number])
                leaves = self._leaves(index, number)
                outputs = self._run(index, number, leaves)
                roots = [
                    (output, gradient)
                    for output, gradient in zip(outputs, self._gradients[number], strict=True)
                    if gradient is not None and output.requires_grad
                ]
                if roots:
                    with self.attention():
                        torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
                self._gradients[number] = [_gradient(leaf) for leaf in leaves]
                received[number] = ()
                del leaves, outputs, roots
        self._inputs.pop()

    def write_gradients(self, index: int, gradients: SpooledTensors, loss_scale: float) -> None:
        """Write the gradients of the parameters that no earlier unit uses."""
        for parameter in self.stages[index].parameters():
            if parameter.grad is not None and self._first_users[id(parameter)] == index:
                scaled = parameter.grad / loss_scale if loss_scale != 1 else parameter.grad
                gradients.add(self._names[id(parameter)], scaled)
                parameter.grad = None

    def buffers_of_replicas(self, before: Mapping[str, torch.Tensor]) -> list[tuple[float, _Buffers]]:
        """Return the samples' weight and all buffers after forward, for each replica."""
        rows = []
        for replica in sorted({microbatch.replica for microbatch in self._microbatches}):
            weight = sum(microbatch.weight for microbatch in self._microbatches if microbatch.replica == replica)
            merged = {name: value for final in self._final for name, value in final[replica].items() if name in before}
            rows.append((weight, {**before, **merged}))
        return rows

    def _in_order(self, index: int) -> Iterator[tuple[int, MicroBatch]]:
        """Yield the micro-batches for the first forward of a unit; each replica starts from the same buffers."""
        initial = _snapshot(self.stages[index], {})
        self._states.append([])
        self._final.append({})
        state, replica = initial, 0
        for number, microbatch in enumerate(self._microbatches):
            if microbatch.replica != replica:
                self._restore(index, initial)
                state, replica = initial, microbatch.replica
            self._states[index].append(state)
            yield number, microbatch
            state = self._final[index][replica] = _snapshot(self.stages[index], state)

    def _run(self, index: int, number: int, values: Sequence[Any]) -> Sequence[Any]:
        with self._key(self._microbatches[number]), self.attention(), self.autocast():
            outputs: Sequence[Any] = self.stages[index](*values)
        return outputs

    def _key(self, microbatch: MicroBatch) -> AbstractContextManager[None]:
        return random_key(seed=self._seed, step=0, first_sample=microbatch.first_sample, device=self._device)

    def _leaves(self, index: int, number: int) -> list[Any]:
        """Return copies of what a unit receives; those that need a gradient are leaves of autograd."""
        values: list[Any] = _clone(list(self._inputs[index][number]))
        if self._training and index > 0:
            for value, needed in zip(values, self._needs_gradient[index - 1], strict=True):
                if needed and (value.is_floating_point() or value.is_complex()):
                    value.requires_grad_()
        return values

    @contextmanager
    def _loaded(self, index: int) -> Iterator[None]:
        """Hold the weights of a unit on the device meanwhile."""
        hollow: list[tuple[nn.Parameter, torch.Tensor]] = []
        try:
            for name, parameter in self.stages[index].named_parameters():
                hollow.append((parameter, parameter.data))
                parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
                self._weights.read(name, parameter.data)
            self.stages[index].refresh_buffers()
            yield
        finally:
            for parameter, data in hollow:
                parameter.data = data

    def _restore(self, index: int, state: _Buffers) -> None:
        with torch.no_grad():
            for name, value in self.stages[index].named_buffers():
                if name in state and value is not state[name]:
                    value.copy_(state[name])


def _snapshot(stage: Stage, previous: _Buffers) -> _Buffers:
    """Copy a unit's buffers; those that are equal to the previous ones are shared with them."""
    return {
        name: previous[name]
        if name in previous
        and previous[name].shape == value.shape
        and bool(equal_or_nan(previous[name], value.detach()).all())
        else value.detach().clone()
        for name, value in stage.named_buffers()
    }


def _share_unchanged(outputs: Sequence[Any], copies: Sequence[Any], received: Sequence[Any]) -> Sequence[Any]:
    """Return the outputs; those that only pass through a unit are what it received, not a copy."""
    originals = {id(copy): original for copy, original in zip(copies, received, strict=True)}
    return [
        originals.get(id(output), output) if not isinstance(output, torch.Tensor) or output._version == 0 else output
        for output in outputs
    ]


def _gradient(value: Any) -> torch.Tensor | None:
    return value.grad if isinstance(value, torch.Tensor) and value.is_leaf else None


def _clone(value: Any) -> Any:
    return structure.map_tensors(torch.clone, value)
