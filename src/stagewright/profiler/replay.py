"""A recorded call of a unit, to be run alone and timed repeatedly.

The backward pass is timed twice: for all gradients, and for the input gradients alone. A run for the weight gradients
alone would propagate through the same chain inside the unit and count that part twice, so the weight gradient is the
difference: input + weight = the whole backward pass.

    round     forward ─► all gradients        forward ─► gradients of the inputs
    samples   forward    backward             forward    backward_input
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import nn

from stagewright.graph.macs import MacCounter
from stagewright.profiler.allocations import AllocationCounter
from stagewright.profiler.profile import Time
from stagewright.profiler.storage import copy_with_tensors, storages_of, tensor_bytes, tensors_in

Result = TypeVar("Result")

# A shorter call is sampled several times per round, because a single sample would be mostly noise.
_ROUND_S = 0.002
_MAX_SAMPLES_IN_ROUND = 10


def summarize(samples_s: Sequence[float]) -> Time:
    """Return the median and interquartile range of the samples; 0 without samples."""
    if not samples_s:
        return Time(median_s=0.0, spread_s=0.0)
    spread_s = 0.0
    if len(samples_s) > 1:
        first, _, third = statistics.quantiles(samples_s, n=4, method="inclusive")
        spread_s = third - first
    return Time(median_s=statistics.median(samples_s), spread_s=spread_s)


def peak_memory_increase(call: Callable[[], Result], device: torch.device) -> tuple[Result, int]:
    """Return the result of a call and the peak of CUDA memory during it, relative to the start."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    return result, int(torch.cuda.max_memory_allocated(device)) - int(before)


def add_times(first: Time, second: Time) -> Time:
    """Return the time of two consecutive runs."""
    return Time(median_s=first.median_s + second.median_s, spread_s=first.spread_s + second.spread_s)


def time_passes(passes_s: Callable[[int], float], rounds: int) -> tuple[float, float]:
    """Return the time of one pass alone and of one after another, from the time of any number of them in sequence."""
    samples = [(passes_s(1), passes_s(3)) for _ in range(rounds + 1)][1:]
    first_s = statistics.median(first for first, _ in samples)
    return first_s, max(0.0, statistics.median(three - first for first, three in samples) / 2)


def scale_time(time: Time, factor: float) -> Time:
    """Return a time multiplied by a factor."""
    return Time(median_s=time.median_s * factor, spread_s=time.spread_s * factor)


class Stopwatch:
    """A timer of calls on a device: the clock on a CPU, events on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def is_asynchronous(self) -> bool:
        """Whether a call returns before the device has run it."""
        return self._device.type == "cuda"

    @property
    def calls_per_sample(self) -> int:
        """Number of back-to-back calls that one sample times.

        A GPU starts late on the first call after a wait. Back-to-back calls share that delay, and kernel launch
        overhead is hidden as in a whole step.
        """
        return 4 if self._device.type == "cuda" else 1

    def time(self, calls: Sequence[Callable[[], Result]]) -> tuple[list[Result], float]:
        """Return the results and the mean seconds per call."""
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


def _active_autocasts() -> list[tuple[str, torch.dtype]]:
    """Return the devices that autocast is on for, with its dtype."""
    return [
        (device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    ]


class Replay:
    """A module with the arguments of one call, and the time samples collected so far."""

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
        results: Callable[[Any], Any] = lambda output: output,
    ) -> None:
        """``results``: the part of the output from which backward starts."""
        self.name = name
        self._results = results
        # A whole model or stage is never run back-to-back (it may not fit in memory); its backward is timed as a whole.
        self._is_whole = is_whole
        self.module = module
        self._training = training
        # One detached tensor for each distinct argument: some modules check whether two arguments are the same tensor.
        detached: dict[int, torch.Tensor] = {}
        self._tensors: list[torch.Tensor] = []
        arguments = (tuple(args), dict(kwargs))
        for index, tensor in enumerate(tensors_in(arguments)):
            leaf = detached.setdefault(id(tensor), tensor.detach())
            if training and index < len(needs_gradient) and needs_gradient[index]:
                leaf.requires_grad_()
            self._tensors.append(leaf)
        # The original tensors may belong to the autograd graph of the whole model, which would stay in memory.
        self._structure = copy_with_tensors(arguments, self._tensors)
        self._parameters = [value for value in module.parameters() if value.requires_grad] if training else []
        self._autocasts = _active_autocasts()  # the model may call the unit inside of one
        self._written: frozenset[int] = frozenset()  # ids of tensors that the module changes in place
        self.macs, self.output_bytes = self._inspect()
        self._inputs = list({id(tensor): tensor for tensor in self._tensors if tensor.requires_grad}.values())
        self._output_gradients: list[torch.Tensor] = []
        self._forward_s: list[float] = []
        self._backward_s: list[float] = []
        self._backward_input_s: list[float] = []

    def _inspect(self) -> tuple[int, int]:
        """Run once on copies to find in-place changes; return the MACs and the bytes of the result."""
        copies = {id(tensor): tensor.detach().clone() for tensor in self._tensors}
        versions = {key: copy._version for key, copy in copies.items()}
        with torch.no_grad(), MacCounter() as counter:
            args, kwargs = copy_with_tensors(self._structure, [copies[id(tensor)] for tensor in self._tensors])
            output = self.module(*args, **kwargs)
        # The graph is about to change these tensors too: copy their current values.
        changed = {key for key, copy in copies.items() if copy._version != versions[key]}
        values = {
            id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad)
            for tensor in self._tensors
            if id(tensor) in changed
        }
        self._tensors = [values.get(id(tensor), tensor) for tensor in self._tensors]
        self._written = frozenset(id(tensor) for tensor in values.values())
        return counter.total, tensor_bytes(tensors_in(output))

    def input_bytes(self, without: Sequence[Any] | frozenset[Any] = ()) -> int:
        """Return the bytes of the storages that the arguments keep alive."""
        return sum(storages_of(self._tensors, without)[0].values())

    @property
    def cost_key(self) -> Hashable:
        """Key of calls that cost the same: class, inputs, parameters, work and mode of the module."""
        inputs = tuple((tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in self._tensors)
        parameters = tuple(
            (name, tuple(value.shape), value.requires_grad) for name, value in self.module.named_parameters()
        )
        modes = tuple(module.training for module in self.module.modules())
        return type(self.module), inputs, parameters, modes, self.macs, self.output_bytes

    def warm_up(self, stopwatch: Stopwatch) -> None:
        """Run once and discard the times, because the first run allocates and tunes."""
        self._sample_once(stopwatch)
        self._forward_s, self._backward_s, self._backward_input_s = [], [], []

    def sample(self, stopwatch: Stopwatch) -> None:
        """Take the samples of one round."""
        spent_s = self._sample_once(stopwatch)
        for _ in range(min(_MAX_SAMPLES_IN_ROUND, int(_ROUND_S / max(spent_s, 1e-9))) - 1):
            self._sample_once(stopwatch)

    def run_once(self) -> None:
        """Run forward and backward, without taking times."""
        targets = [*self._inputs, *self._parameters]
        with torch.enable_grad():
            results = [tensor for tensor in tensors_in(self._results(self._call()())) if tensor.requires_grad]
            if results and targets:
                ones = [torch.ones_like(result) for result in results]
                torch.autograd.grad(results, targets, ones, allow_unused=True)

    def working_bytes(self, device: torch.device) -> tuple[int, int]:
        """Return the peak memory of a forward and of a backward pass above their start.

        On a CPU, where workers count their own tensors, only inference is counted; training gives 0.
        """
        if device.type != "cuda":
            if self._training:
                return 0, 0
            call = self._call()
            with torch.no_grad(), AllocationCounter() as counter:
                call()
            return counter.peak_bytes, 0
        with torch.set_grad_enabled(self._training):
            output, forward = peak_memory_increase(self._call(), device)
            results = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            targets = [*self._inputs, *self._parameters]
            if not results or not targets:
                return forward, 0
            ones = [torch.ones_like(result) for result in results]
            _, backward = peak_memory_increase(
                lambda: torch.autograd.grad(results, targets, ones, allow_unused=True), device
            )
        return forward, backward

    def pass_times(self, stopwatch: Stopwatch, rounds: int = 5) -> tuple[float, float]:
        """Return the time of forward and backward from a standstill, and of those right after another pass.

        Zeros on a CPU, where nothing overlaps.
        """
        if not stopwatch.is_asynchronous:
            return 0.0, 0.0
        return time_passes(lambda count: self._passes_s(stopwatch, count), rounds)

    def _passes_s(self, stopwatch: Stopwatch, count: int) -> float:
        """Time several passes, forward and backward, as one call."""
        targets = [*self._inputs, *self._parameters]

        def run() -> None:
            for _ in range(count):
                results = [tensor for tensor in tensors_in(self._results(self._call()())) if tensor.requires_grad]
                if results and targets:
                    ones = [torch.ones_like(result) for result in results]
                    torch.autograd.grad(results, targets, ones, allow_unused=True)

        with torch.set_grad_enabled(self._training):
            return stopwatch.time([run])[1]

    def times(self, alike: Sequence[Replay] = ()) -> tuple[Time, Time, Time]:
        """Return forward, input gradient and weight gradient times, pooling the samples of equal calls ``alike``."""
        replays = [self, *(replay for replay in alike if replay is not self)]
        forward_s = [sample for replay in replays for sample in replay._forward_s]
        backward_s = [sample for replay in replays for sample in replay._backward_s]
        backward_input_s = [sample for replay in replays for sample in replay._backward_input_s]
        forward = summarize(forward_s)
        backward, backward_input = summarize(backward_s), summarize(backward_input_s)
        if not backward_input_s:
            return forward, backward_input, backward
        differences_s = [both - inputs for both, inputs in zip(backward_s, backward_input_s, strict=True)]
        weight_s = max(0.0, backward.median_s - backward_input.median_s) if self._parameters else 0.0
        return forward, backward_input, Time(median_s=weight_s, spread_s=summarize(differences_s).spread_s)

    def _sample_once(self, stopwatch: Stopwatch) -> float:
        num_calls = 1 if self._is_whole else stopwatch.calls_per_sample
        if not self._training:
            with torch.no_grad():
                self._forward(stopwatch, num_calls)
            return self._forward_s[-1]
        with torch.enable_grad():
            outputs = self._forward(stopwatch, num_calls)
            spent_s = self._forward_s[-1]
            if not outputs[0] or not (self._inputs or self._parameters):
                return spent_s
            self._backward_s.append(self._backward(stopwatch, outputs, [*self._inputs, *self._parameters]))
            spent_s += self._backward_s[-1]
            del outputs
            if self._inputs and self._parameters and not self._is_whole:
                outputs = self._forward(stopwatch, num_calls)
                self._backward_input_s.append(self._backward(stopwatch, outputs, self._inputs))
                spent_s += self._forward_s[-1] + self._backward_input_s[-1]
            elif self._inputs and not self._parameters:
                self._backward_input_s.append(self._backward_s[-1])
        return spent_s

    def _forward(self, stopwatch: Stopwatch, num_calls: int) -> list[list[torch.Tensor]]:
        """Time forward; return the outputs of each call that require a gradient."""
        calls = [self._call() for _ in range(num_calls)]
        outputs, seconds = stopwatch.time(calls)
        self._forward_s.append(seconds)
        return [[tensor for tensor in tensors_in(self._results(output)) if tensor.requires_grad] for output in outputs]

    def _call(self) -> Callable[[], Any]:
        copies = {id(tensor): tensor.clone() for tensor in self._tensors if id(tensor) in self._written}
        tensors = [copies.get(id(tensor), tensor) for tensor in self._tensors]
        args, kwargs = copy_with_tensors(self._structure, tensors)
        if not self._autocasts:
            return lambda: self.module(*args, **kwargs)

        def call() -> Any:
            with ExitStack() as stack:
                for device, dtype in self._autocasts:
                    stack.enter_context(torch.autocast(device, dtype=dtype))
                return self.module(*args, **kwargs)

        return call

    def _backward(self, stopwatch: Stopwatch, outputs: list[list[torch.Tensor]], targets: list[torch.Tensor]) -> float:
        if [gradient.shape for gradient in self._output_gradients] != [output.shape for output in outputs[0]]:
            self._output_gradients = [torch.ones_like(output) for output in outputs[0]]

        def differentiate(results: list[torch.Tensor]) -> Callable[[], object]:
            return lambda: torch.autograd.grad(results, targets, self._output_gradients, allow_unused=True)

        return stopwatch.time([differentiate(results) for results in outputs])[1]
