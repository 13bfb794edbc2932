"""CUDA graphs of stages: forward and backward of a micro-batch are launched as one graph each.

    slot     static inputs ─► forward graph ─► static outputs        one for each micro-batch in flight
             static output gradients ─► backward graph ─► input gradients, and parameter gradients added up

A micro-batch takes a free slot in its forward and gives it back after its backward, so that slots are as many as
micro-batches in flight: m under GPipe, p − i on stage i of 1F1B. Every slot has its own memory, where its activations
stay between forward and backward. A backward graph is recorded in the first backward that needs it, because only then
it is known which outputs have a gradient; it adds the parameters' gradients to tensors that stay in place, those of
linear layers inside the matrix product that computes them.

Graphs replay kernels, not Python: hooks of units run while recording only, and random numbers would be the same each
time (models that draw some are refused before). On a CPU nothing is recorded and everything runs again, for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stagewright.engine.batch.random_key import without_key
from stagewright.engine.weight_gradients.in_products import RecordedLinears
from stagewright.errors import UsageError
from stagewright.graph.stage import Stage
from stagewright.machine.garbage_collection import no_garbage_collection

_MAX_SMALL = 2**16  # elements of a parameter whose addition takes less time than its launch
_MAX_CONSTANT = 16  # elements of a host tensor whose value becomes part of a graph


class GradientSums:
    """The tensors in which backward graphs add up the gradients of parameters; shared by the stages of a worker."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        """The stream of all recordings, on which autograd accumulates gradients too; None on a CPU."""
        self._sums: dict[nn.Parameter, torch.Tensor] = {}

    def total(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the tensor in which the parameter's gradient is added up; it stays where it is."""
        if parameter not in self._sums:
            self._sums[parameter] = torch.empty_like(parameter, requires_grad=False)
        return self._sums[parameter]

    def prepare(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make the tensors the parameters' ``grad``; without gradients so far they start at zero."""
        new = []
        for parameter in parameters:
            gradient = parameter.grad
            total = self.total(parameter)
            if gradient is total:
                continue
            if gradient is None:
                new.append(total.data)
            else:
                total.data.copy_(gradient)
            parameter.grad = total
        if new:
            torch._foreach_zero_(new)

    def add(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add the parameters' new gradients to their sums, by one kernel for many, and make the sums their ``grad``."""
        pairs = [(self.total(parameter), parameter.grad) for parameter in parameters]
        new = [(total.data, gradient) for total, gradient in pairs if gradient is not None]
        if new:
            torch._foreach_add_([total for total, _ in new], [gradient for _, gradient in new])
        for parameter, (total, _) in zip(parameters, pairs, strict=True):
            parameter.grad = total


class GraphedForward:
    """The forward of one stage, ``forward(inputs, microbatch)``, replayed from CUDA graphs."""

    def __init__(
        self,
        stage: Stage,
        parameters: Sequence[nn.Parameter],
        sums: GradientSums,
        *,
        device: torch.device,
        copies_outputs: bool,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """``parameters``: those to train. ``copies_outputs``: return copies of the outputs, which outlive the slot."""
        self.stage, self.parameters, self.sums = stage, list(parameters), sums
        self.device, self.autocast, self.copies_outputs = device, autocast, copies_outputs
        self.replayed: ReplayedForward | None = None
        """The last micro-batch, if it has a backward."""
        self.linears = RecordedLinears(stage, self.parameters, sums.total)
        """The layers whose weight gradients are added up inside their products."""
        self._slots: dict[Hashable, list[Slot]] = {}
        self._mode: Hashable = None
        self._modules = [module for module in stage.modules() if not next(module.children(), None)]

    def __call__(self, inputs: Sequence[Any], microbatch: int) -> tuple[Any, ...]:
        """Return the stage's outputs for one micro-batch, as leaves of autograd."""
        free = self._free_slots(inputs)
        slot = free.pop() if free else Slot(self, inputs)
        values = slot.forward(inputs)
        if not torch.is_grad_enabled():
            free.append(slot)
            return tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in values)
        outputs = tuple(self._leaf(value) for value in values)
        self.replayed = ReplayedForward(slot, free, outputs)
        return outputs

    @property
    def num_free_slots(self) -> int:
        """Slots that no micro-batch is in, of the last mode: all of them between steps."""
        return sum(map(len, self._slots.values()))

    def _leaf(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        leaf = value.detach().clone() if self.copies_outputs else value.detach()
        return leaf.requires_grad_(value.requires_grad)

    def _free_slots(self, inputs: Sequence[Any]) -> list[Slot]:
        """Return the free slots for inputs of such shapes; slots recorded in another mode are dropped."""
        mode = tuple(module.training for module in self._modules), _arithmetic(self.device)
        if mode != self._mode:
            self._mode = mode
            self._slots.clear()
        key = (*map(_describe, inputs), self.stage.variant)
        return self._slots.setdefault(key, [])


class Slot:
    """Graphs for one micro-batch at a time: its tensors stay where they are."""

    def __init__(self, owner: GraphedForward, inputs: Sequence[Any]) -> None:
        self.owner = owner
        self.stream = owner.sums.stream
        self._training = torch.is_grad_enabled()
        self._inputs = [_copy_input(value) for value in inputs]
        self._outputs: tuple[Any, ...] = ()
        self._backwards: dict[tuple[bool, ...], _Backward] = {}
        self._pool = None if self.stream is None else torch.cuda.graph_pool_handle()
        self._warm_up()
        self._run = self.record("forward", self._forward)

    def forward(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Run the stage on these inputs; the outputs are overwritten by the next micro-batch of this slot."""
        for kept, value in zip(self._inputs, inputs, strict=True):
            if _is_static(kept):
                kept.data.copy_(value)  # unknown to autograd, which saved this tensor when the graph was recorded
        self._run()
        return self._outputs

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Add up the parameters' gradients; return those of the inputs that require one."""
        pattern = tuple(gradient is not None for gradient in gradients)
        if pattern not in self._backwards:
            self._backwards[pattern] = _Backward(self, gradients)
        return self._backwards[pattern](gradients)

    def record(self, what: str, call: Callable[[], None]) -> Callable[[], None]:
        """Record a call as a CUDA graph; return what replays it."""
        if self.stream is None:
            return call
        graph = torch.cuda.CUDAGraph()
        try:
            with self.aside(), no_garbage_collection():  # freeing memory of another graph would end the recording
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    call()
                except BaseException:
                    with suppress(RuntimeError):  # the recording is lost; its first error is the one to report
                        graph.capture_end()
                    raise
                graph.capture_end()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            calls = self.owner.stage.calls
            raise UsageError(
                f"the {what} of stage {calls[0].name} … {calls[-1].name} can't be recorded as a CUDA graph "
                f"({str(error).splitlines()[0]}): leave out cuda_graphs (--cuda-graphs)"
            ) from error
        return graph.replay

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run on the stream of recordings, in order with the current one."""
        assert self.stream is not None, "only a GPU has streams"
        current = torch.cuda.current_stream(self.owner.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)

    def roots(self) -> list[torch.Tensor]:
        """Return the outputs that require a gradient."""
        return [value for value in self._outputs if isinstance(value, torch.Tensor) and value.requires_grad]

    def leaves(self) -> list[torch.Tensor]:
        """Return the inputs that require a gradient."""
        return [value for value in self._inputs if isinstance(value, torch.Tensor) and value.requires_grad]

    def _forward(self) -> None:
        accumulating = self.owner.linears.active() if self._training else nullcontext()
        with without_key(), torch.set_grad_enabled(self._training), self.owner.autocast(), accumulating:
            self._outputs = self.owner.stage(*self._inputs)

    def _warm_up(self) -> None:
        """Run forward once, so that libraries and compilers are ready; buffers are left unchanged."""
        if self.stream is None:
            return
        buffers = [(value, value.clone()) for value in self.owner.stage.buffers()]
        with self.aside():
            self._forward()
            self._outputs = ()
            with torch.no_grad():
                for value, before in buffers:
                    value.copy_(before)


class _Backward:
    """The backward graph of a slot for gradients of the same outputs."""

    def __init__(self, slot: Slot, gradients: Sequence[torch.Tensor | None]) -> None:
        self._slot, self._sums = slot, slot.owner.sums
        self._gradients = [None if gradient is None else gradient.clone() for gradient in gradients]
        self._input_gradients: list[torch.Tensor | None] = []
        with nullcontext() if slot.stream is None else slot.aside():
            self._parameters = self._reached_parameters()
        self._sums.prepare(self._parameters)
        with slot.owner.linears.active():
            self._run = slot.record("backward", self._call)

    def __call__(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        for kept, gradient in zip(self._gradients, gradients, strict=True):
            if kept is not None and gradient is not None:
                kept.copy_(gradient)
        self._sums.prepare(self._parameters)
        self._run()
        return [None if gradient is None else gradient.clone() for gradient in self._input_gradients]

    def _reached_parameters(self) -> list[nn.Parameter]:
        """Run backward once from the tensors of the last forward; return the parameters that get a gradient."""
        roots, gradients = self._pairs()
        parameters = self._slot.owner.parameters
        if not roots or not parameters:
            return []
        with self._slot.owner.linears.observed() as reached:
            found = torch.autograd.grad(roots, parameters, gradients, allow_unused=True, retain_graph=True)
        others = [parameter for parameter, gradient in zip(parameters, found, strict=True) if gradient is not None]
        return list(dict.fromkeys([*others, *reached]))

    def _call(self) -> None:
        roots, gradients = self._pairs()
        leaves = self._slot.leaves()
        small = [parameter for parameter in self._parameters if parameter.numel() <= _MAX_SMALL]
        for parameter in small:
            parameter.grad = None
        if roots:
            torch.autograd.backward(
                roots,
                gradients,
                retain_graph=self._slot.stream is not None,  # the activations stay for the next replay
                inputs=[*leaves, *self._slot.owner.parameters],
            )
        self._sums.add(small)
        self._input_gradients = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None

    def _pairs(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the outputs that have a gradient, and these gradients."""
        pairs = zip(self._slot.roots(), self._gradients, strict=True)
        reached = [(root, gradient) for root, gradient in pairs if gradient is not None]
        return [root for root, _ in reached], [gradient for _, gradient in reached]


@dataclass(slots=True)
class ReplayedForward:
    """A micro-batch in a slot, from its forward to its backward."""

    slot: Slot
    free: list[Slot]
    outputs: tuple[Any, ...]
    is_done: bool = False

    def backward(self) -> list[torch.Tensor | None]:
        """Run backward from the gradients that the outputs have got; return those of the inputs."""
        roots = [value for value in self.outputs if isinstance(value, torch.Tensor) and value.requires_grad]
        gradients = [root.grad for root in roots]
        for root in roots:
            root.grad = None
        try:
            return self.slot.backward(gradients)
        finally:
            self.release()

    def release(self) -> None:
        """Give the slot back."""
        if not self.is_done:
            self.is_done = True
            self.free.append(self.slot)

    def __del__(self) -> None:  # a micro-batch whose backward never runs
        self.release()


def _is_static(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not _is_constant(value)


def _is_constant(value: torch.Tensor) -> bool:
    """Whether a tensor's value is part of the graph: a number on the host, like a length."""
    return value.device.type == "cpu" and value.numel() <= _MAX_CONSTANT and not value.requires_grad


def _copy_input(value: Any) -> Any:
    if not _is_static(value):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _describe(value: Any) -> Hashable:
    if not isinstance(value, torch.Tensor):
        return type(value), value
    if _is_constant(value):
        return value.dtype, tuple(value.shape), tuple(value.flatten().tolist())
    return value.dtype, tuple(value.shape), value.requires_grad


def _arithmetic(device: torch.device) -> Hashable:
    """Return the settings of float32 arithmetic, which recorded kernels keep."""
    if device.type != "cuda":
        return ()
    cudnn: Any = torch.backends.cudnn
    backends: list[Any] = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]
    return cudnn.deterministic, *(backend.fp32_precision for backend in backends)
