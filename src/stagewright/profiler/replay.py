"""One recorded call of a unit, ready to be run alone, again and again.

The backward pass is timed in two ways: for all gradients, and for those of the inputs alone. A run for the
parameters alone would walk down the same chain inside the unit and count that part twice, so the weights'
share is the difference: input + weight = the whole backward pass.

    round     forward ─► all gradients        forward ─► gradients of the inputs
    samples   forward    backward             forward    backward_input
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from stagewright.graph.macs import MacCounter
from stagewright.profiler.allocations import Made
from stagewright.profiler.profile import Time
from stagewright.profiler.storage import copy_with_tensors, storages_of, tensor_bytes, tensors_in

__all__ = ["Replay", "Stopwatch", "added", "memory_rise", "time_of"]

Result = TypeVar("Result")

# A call that takes less than this is run several times a round, since one sample of it would be mostly noise.
_ROUND_S = 0.002
_MAX_SAMPLES_IN_ROUND = 10


def time_of(samples_s: Sequence[float]) -> Time:
    """Median and interquartile range of the samples; 0 where there are none."""
    if not samples_s:
        return Time(median_s=0.0, spread_s=0.0)
    spread_s = 0.0
    if len(samples_s) > 1:
        first, _, third = statistics.quantiles(samples_s, n=4, method="inclusive")
        spread_s = third - first
    return Time(median_s=statistics.median(samples_s), spread_s=spread_s)


def memory_rise(call: Callable[[], Result], device: torch.device) -> tuple[Result, int]:
    """The result of a call, and how far the CUDA allocator's memory rose above its start meanwhile."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    return result, int(torch.cuda.max_memory_allocated(device)) - int(before)


def added(one: Time, other: Time) -> Time:
    """One after the other."""
    return Time(median_s=one.median_s + other.median_s, spread_s=one.spread_s + other.spread_s)


class Stopwatch:
    """Times calls on a device: the clock on a CPU, events on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def num_in_row(self) -> int:
        """Calls of a unit to be timed in a row.

        A GPU starts late on the first call after a wait; in a row, that is shared by all of them, and launches
        hide behind kernels as they do in a whole step.
        """
        return 4 if self._device.type == "cuda" else 1

    def time(self, calls: Sequence[Callable[[], Result]]) -> tuple[list[Result], float]:
        """The results, and the mean seconds of one call."""
        if self._device.type != "cuda":
            start_s = time.perf_counter()
            results = [call() for call in calls]
            return results, (time.perf_counter() - start_s) / len(calls)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self._device)
        begin.record()
        results = [call() for call in calls]
        end.record()
        torch.cuda.synchronize(self._device)
        return results, begin.elapsed_time(end) / 1e3 / len(calls)


class Replay:
    """A module with the arguments of one call; collects samples of its times."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        training: bool,
        needs_gradient: Sequence[bool] = (),
        is_whole: bool = False,
    ) -> None:
        self.name = name
        # A whole model or stage: never several times in a row (memory may not hold it), its backward in one piece.
        self._is_whole = is_whole
        self.module = module
        self._training = training
        # One new tensor for each old one: some modules ask whether two arguments are the same tensor.
        renewed: dict[int, torch.Tensor] = {}
        self._tensors: list[torch.Tensor] = []
        given = (tuple(args), dict(kwargs))
        for index, tensor in enumerate(tensors_in(given)):
            one = renewed.setdefault(id(tensor), tensor.detach())
            if training and index < len(needs_gradient) and needs_gradient[index]:
                one.requires_grad_()
            self._tensors.append(one)
        # Not as they were given: these may hang on the graph of a whole model, which would be kept.
        self._structure = copy_with_tensors(given, self._tensors)
        self._parameters = [one for one in module.parameters() if one.requires_grad] if training else []
        self._written: frozenset[int] = frozenset()  # tensors that the module changes in place, by id
        self.macs, self.output_bytes = self._inspect()
        self._inputs = list({id(one): one for one in self._tensors if one.requires_grad}.values())
        self._ones: list[torch.Tensor] = []
        self._forward_s: list[float] = []
        self._backward_s: list[float] = []
        self._backward_input_s: list[float] = []

    def _inspect(self) -> tuple[int, int]:
        """Runs once on copies and learns what is changed in place; returns MACs and bytes of the result."""
        copies = {id(tensor): tensor.detach().clone() for tensor in self._tensors}
        versions = {key: copy._version for key, copy in copies.items()}
        with torch.no_grad(), MacCounter() as counter:
            args, kwargs = copy_with_tensors(self._structure, [copies[id(one)] for one in self._tensors])
            output = self.module(*args, **kwargs)
        # The graph is about to change these too: keep their values as they are now.
        changed = {key for key, copy in copies.items() if copy._version != versions[key]}
        originals = {id(one): one for one in self._tensors if id(one) in changed}
        values = {key: one.detach().clone().requires_grad_(one.requires_grad) for key, one in originals.items()}
        self._tensors = [values.get(id(one), one) for one in self._tensors]
        self._written = frozenset(id(one) for one in values.values())
        return counter.total, tensor_bytes(tensors_in(output))

    def input_bytes(self, without: Sequence[Any] | frozenset[Any] = ()) -> int:
        """Bytes of the storages that the arguments keep alive."""
        return sum(storages_of(self._tensors, without)[0].values())

    @property
    def likeness(self) -> Hashable:
        """What must agree for two calls to cost the same: class, inputs, parameters, work and mode of the module."""
        inputs = tuple((tuple(one.shape), one.dtype, one.requires_grad) for one in self._tensors)
        parameters = tuple((name, tuple(one.shape), one.requires_grad) for name, one in self.module.named_parameters())
        modes = tuple(module.training for module in self.module.modules())
        return type(self.module), inputs, parameters, modes, self.macs, self.output_bytes

    def warm_up(self, stopwatch: Stopwatch) -> None:
        """Runs once and forgets the times, as the first run allocates and tunes."""
        self._sample_once(stopwatch)
        self._forward_s, self._backward_s, self._backward_input_s = [], [], []

    def sample(self, stopwatch: Stopwatch) -> None:
        """Takes the samples of one round."""
        spent_s = self._sample_once(stopwatch)
        for _ in range(min(_MAX_SAMPLES_IN_ROUND, int(_ROUND_S / max(spent_s, 1e-9))) - 1):
            self._sample_once(stopwatch)

    def working_bytes(self, device: torch.device) -> tuple[int, int]:
        """How far memory rises above the start of a forward and of a backward pass.

        On a CPU, whose workers count their own tensors: by those that an inference makes; 0 where autograd keeps some.
        """
        if device.type != "cuda":
            if self._training:
                return 0, 0
            call = self._call()
            with torch.no_grad(), Made() as made:
                call()
            return made.most_bytes, 0
        with torch.set_grad_enabled(self._training):
            output, forward = memory_rise(self._call(), device)
            results = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            targets = [*self._inputs, *self._parameters]
            if not results or not targets:
                return forward, 0
            ones = [torch.ones_like(result) for result in results]
            _, backward = memory_rise(lambda: torch.autograd.grad(results, targets, ones, allow_unused=True), device)
        return forward, backward

    def times(self, alike: Sequence[Replay] = ()) -> tuple[Time, Time, Time]:
        """Forward, backward for the inputs, and the rest of backward; over the samples of units ``alike``, too."""
        every = [self, *(one for one in alike if one is not self)]
        forward_s = [sample for one in every for sample in one._forward_s]
        backward_s = [sample for one in every for sample in one._backward_s]
        backward_input_s = [sample for one in every for sample in one._backward_input_s]
        forward = time_of(forward_s)
        whole, for_inputs = time_of(backward_s), time_of(backward_input_s)
        if not backward_input_s:
            return forward, for_inputs, whole
        rest_s = [ours - inputs for ours, inputs in zip(backward_s, backward_input_s, strict=True)]
        weight_s = max(0.0, whole.median_s - for_inputs.median_s) if self._parameters else 0.0
        weight = Time(median_s=weight_s, spread_s=time_of(rest_s).spread_s)
        return forward, for_inputs, weight

    def _sample_once(self, stopwatch: Stopwatch) -> float:
        num_in_row = 1 if self._is_whole else stopwatch.num_in_row
        if not self._training:
            with torch.no_grad():
                self._forward(stopwatch, num_in_row)
            return self._forward_s[-1]
        with torch.enable_grad():
            outputs = self._forward(stopwatch, num_in_row)
            spent_s = self._forward_s[-1]
            if not outputs[0] or not (self._inputs or self._parameters):
                return spent_s
            self._backward_s.append(self._backward(stopwatch, outputs, [*self._inputs, *self._parameters]))
            spent_s += self._backward_s[-1]
            del outputs
            if self._inputs and self._parameters and not self._is_whole:
                outputs = self._forward(stopwatch, num_in_row)
                self._backward_input_s.append(self._backward(stopwatch, outputs, self._inputs))
                spent_s += self._forward_s[-1] + self._backward_input_s[-1]
            elif self._inputs and not self._parameters:
                self._backward_input_s.append(self._backward_s[-1])
        return spent_s

    def _forward(self, stopwatch: Stopwatch, num_in_row: int) -> list[list[torch.Tensor]]:
        """Runs forward; the results that need gradients, for each run in the row."""
        calls = [self._call() for _ in range(num_in_row)]
        outputs, seconds = stopwatch.time(calls)
        self._forward_s.append(seconds)
        return [[tensor for tensor in tensors_in(output) if tensor.requires_grad] for output in outputs]

    def _call(self) -> Callable[[], Any]:
        copies = {id(one): one.clone() for one in self._tensors if id(one) in self._written}
        args, kwargs = copy_with_tensors(self._structure, [copies.get(id(one), one) for one in self._tensors])
        return lambda: self.module(*args, **kwargs)

    def _backward(self, stopwatch: Stopwatch, outputs: list[list[torch.Tensor]], targets: list[torch.Tensor]) -> float:
        if [one.shape for one in self._ones] != [one.shape for one in outputs[0]]:
            self._ones = [torch.ones_like(output) for output in outputs[0]]

        def differentiate(results: list[torch.Tensor]) -> Callable[[], object]:
            return lambda: torch.autograd.grad(results, targets, self._ones, allow_unused=True)

        return stopwatch.time([differentiate(results) for results in outputs])[1]
