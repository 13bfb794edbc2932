"""Capture a model: watch it run, choose its units, trace the glue between them, put the units back.

If tracing fails inside the code of an opened submodule (it branches on values, say), that submodule becomes one unit
and tracing starts again, as long as it holds less than half of the work; otherwise the error says where it failed and
what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from stagewright.errors import CaptureError, UsageError
from stagewright.graph.check import difference, mixed, steady
from stagewright.graph.choose_units import (
    UnitChoice,
    choose_units,
    has_backward_hooks,
    outermost_calls,
    repeated_blocks,
)
from stagewright.graph.preserve import preserved
from stagewright.graph.symbols import is_fixed
from stagewright.graph.tracing.assemble import assemble
from stagewright.graph.tracing.example import Arguments, Reading, as_arguments, likely_dims, readings
from stagewright.graph.tracing.failure_location import explain_failure, failing_module, reason_of
from stagewright.graph.tracing.observe import CallForm, Observation, TensorForm, observe
from stagewright.graph.tracing.trace import Trace, holds_tensor, trace
from stagewright.graph.unit_graph import UnitGraph
from stagewright.graph.values import UnitCall
from stagewright.machine.cpu_offload import visiting

__all__ = ["StageList", "capture"]

_MOST_RETRIES = 12


class StageList(nn.Module):
    """Stages given by the user as a list: each takes what the one before returns (a tuple as several arguments)."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        for index, stage in enumerate(stages):
            self.add_module(str(index), stage)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stages one after another."""
        first, *rest = self.children()
        value = first(*args, **kwargs)
        for stage in rest:
            value = stage(*value) if isinstance(value, tuple) else stage(value)
        return value


def capture(
    model: nn.Module | Sequence[nn.Module],
    args: Any,
    kwargs: Mapping[str, Any] | None = None,
    units: str | Sequence[str] = "auto",
    batch_dim: int | None = None,
) -> UnitGraph:
    """Capture a model as a graph of its units, in the mode (train or eval) that it is in.

    ``args`` and ``kwargs`` are the arguments of one forward call, with two samples or more where possible. ``units`` is
    ``"auto"`` (whole blocks), ``"leaf"`` (the finest cut) or a list of module names to be kept whole. ``batch_dim`` is
    the inputs' dimension that counts samples, found by trying if it is not given. A list of modules in place of a model
    is taken as its stages. The model is left as it was.
    """
    if not isinstance(model, nn.Module):
        stages = list(model) if isinstance(model, (list, tuple)) else []
        if not stages or not all(isinstance(stage, nn.Module) for stage in stages):
            raise UsageError(f"capture takes an nn.Module or a list of them, not {type(model).__name__}")
        model, units = StageList(stages), [str(index) for index in range(len(stages))]
    if next(model.parameters(), None) is None:
        raise UsageError(f"{type(model).__name__} has no parameters: there is nothing to place on devices")
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise UsageError(
            f"{lazy[0]!r} of {type(model).__name__} is not initialised yet; run one batch through it first"
        )
    arguments = as_arguments(args, kwargs)
    if batch_dim is not None and not readings(arguments, (batch_dim,)):
        raise UsageError(f"batch_dim={batch_dim}, but no input has so many dimensions")
    places = [leaf.device for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    with preserved(model), visiting(model, places[0] if places else torch.device("cpu")):
        return _Capture(model, arguments, units, likely_dims(model) if batch_dim is None else (batch_dim,)).run()


class _Capture:
    """One capture, with its retries."""

    def __init__(
        self, model: nn.Module, arguments: Arguments, units: str | Sequence[str], batch_dims: Sequence[int]
    ) -> None:
        self.model = model
        self.batch_dims = batch_dims
        self.arguments = arguments
        self.units = units
        self.notes: list[str] = []
        self.modules = dict(model.named_modules(remove_duplicate=False))

    def run(self) -> UnitGraph:
        observation, other, reading, arguments, sizes = self.watch()
        closed = self.unrepeatable(observation, other)
        while True:
            choice = choose_units(self.model, observation, self.units, closed)
            try:
                self.check_numbers(choice, observation, other)
                traced = self.trace(choice, observation, other, reading, arguments, sizes)
                break
            except Exception as error:  # whatever torch.export or the model's own code raises
                if isinstance(error, UsageError) and not isinstance(error, CaptureError):
                    raise
                if not self.close(error, choice, observation, closed):
                    raise explain_failure(error, self.model) from error
        assembled = assemble(traced)
        branches = [branch for branch in traced.branches if not all(map(branch.holds_at, range(1, 65)))]
        inputs = [node.meta.get("val") for node in assembled.graph.nodes if node.op == "placeholder"]
        dynamic = reading is not None and not is_fixed(reading.size_of(inputs))
        if not dynamic:
            self.notes.append(f"works for a batch of {sizes[0]} only: the model's own code depends on that size")
        batch_size = reading.batch_size if reading is not None and dynamic else sizes[0]
        flags = {name: self.modules[name].training for name in sorted(choice.opened)}
        graph = UnitGraph(
            model=self.model,
            calls=self.unit_calls(observation, choice),
            assembled=assembled,
            inputs=inputs,
            batch_size=batch_size,
            dynamic=dynamic,
            flags=flags,
            notes=tuple(self.notes),
            branches=branches,
            recapture=lambda: capture(self.model, *self.arguments, self.units, reading.dim if reading else None),
        )
        self.verify(graph, reading if dynamic else None, arguments, sizes)
        return graph

    def verify(self, graph: UnitGraph, reading: Reading | None, arguments: Arguments, sizes: tuple[int, int]) -> None:
        """Compare the graph with the model on other values, and on a batch of a size that was not watched.

        In train mode gradients are compared too, on the smaller of both.
        """
        batches = {sizes[0]: arguments if reading is None else mixed(arguments, reading.dim, reading.leaves)}
        other = 2 * sizes[0] + 1
        if reading is not None and graph.holds_for(other):
            batches[other] = mixed(reading.resized(self.arguments, other), reading.dim, reading.leaves)
        tried = {tuple(True for _ in graph.branches)}
        for size in range(1, 65):
            answers = tuple(branch.holds_at(size) for branch in graph.branches)
            if (
                reading is not None and answers not in tried
            ):  # the smallest batch that branches like this: now, while all parameters are here
                tried.add(answers)
                graph.try_branches(*mixed(reading.resized(self.arguments, size), reading.dim, reading.leaves))
        for size, (args, kwargs) in batches.items():
            gradients = self.model.training and size == sizes[0]
            problem = difference(self.model, graph, args, kwargs, with_gradients=gradients)
            if problem is not None:
                raise CaptureError(
                    f"can't capture {type(self.model).__name__}: with {size} samples the graph is not the model "
                    f"({problem}); the code between units depends on something that can't be traced (requires_grad, a "
                    "size that is not proportional to the batch); keep it inside a unit, or give a list of stages"
                )

    def unrepeatable(self, observation: Observation, other: Observation | None) -> set[str]:
        """Submodules to be kept whole, for their own code has effects that a graph would lose."""
        found = {**observation.unrepeatable, **(other.unrepeatable if other is not None else {})}
        root = found.pop("", None)
        if root is not None and ("random" in root or "hook" in root):
            raise CaptureError(
                f"can't capture {type(self.model).__name__}: its own code {root}, which a graph would lose; move that "
                "code into a submodule (or draw random numbers with torch)"
            )
        if root is not None and not steady(self.model, *self.arguments):
            raise CaptureError(
                f"can't capture {type(self.model).__name__}: its own code {root}, and its results depend on that; "
                "keep such a value in a buffer, or move that code into a submodule"
            )
        if has_backward_hooks(self.model):
            raise CaptureError(
                f"can't capture {type(self.model).__name__}: it has a backward hook, which stages would lose"
            )
        self.notes.extend(f"{name} is kept whole: its own code {what}" for name, what in found.items())
        return set(found)

    def check_numbers(self, choice: UnitChoice, observation: Observation, other: Observation | None) -> None:
        """Refuse a unit that returns what a graph would have as a constant: a number that varies, an opaque object."""
        second_run = other if other is not None else observation
        pairs = zip(outermost_calls(observation, choice.units), outermost_calls(second_run, choice.units), strict=True)
        for first, second in pairs:
            for one, two in zip(first.out_leaves, second.out_leaves, strict=True):
                problem = None
                if isinstance(one, int | float) and one != two:
                    problem = f"unit {first.name!r} returns a number that was {one} and then {two}"
                elif not isinstance(one, TensorForm) and holds_tensor(one):
                    problem = f"unit {first.name!r} returns a {type(one).__name__}, an object with tensors in it"
                if problem is not None:
                    error = CaptureError(problem)
                    error.inside = observation.calls[first.parent].name if first.parent is not None else ""
                    raise error

    def watch(self) -> tuple[Observation, Observation | None, Reading | None, Arguments, tuple[int, int]]:
        """Run the model at two batch sizes, trying where the batch might be."""
        problem: Exception | None = None
        for reading in readings(self.arguments, self.batch_dims):
            given = max(reading.batch_size, 2)
            for base, size in dict.fromkeys([(2, 3), (given, given + 1), (given, 2 * given)]):
                try:
                    arguments = reading.resized(self.arguments, base)
                    first = observe(self.model, *arguments)
                    second = observe(self.model, *reading.resized(self.arguments, size))
                except Exception as error:  # the model's own
                    problem = problem or error
                    continue
                if _same_calls(first, second):
                    return first, second, reading, arguments, (base, size)
        try:
            only = observe(self.model, *self.arguments)
        except Exception as error:
            shapes = [
                f"{list(leaf.shape)} {leaf.dtype}"
                for leaf in pytree.tree_leaves(self.arguments)
                if hasattr(leaf, "shape")
            ]
            raise CaptureError(
                f"{type(self.model).__name__} itself fails on the example ({', '.join(shapes)}): "
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            ) from error
        size = next((reading.batch_size for reading in readings(self.arguments, self.batch_dims)), 1)
        self.notes.append(
            "no other batch size was tried: the model does not run at another one"
            + (f" ({type(problem).__name__}: {problem})" if problem else "")
        )
        return only, None, None, self.arguments, (size, size + 1)

    def trace(
        self,
        choice: UnitChoice,
        observation: Observation,
        other: Observation | None,
        reading: Reading | None,
        arguments: Arguments,
        sizes: tuple[int, int],
    ) -> Trace:
        calls = outermost_calls(observation, choice.units)
        if not calls:
            raise UsageError(
                f"{type(self.model).__name__} is one single unit, with no submodules to cut between; "
                "put it into an nn.Sequential with what comes before or after"
            )
        return trace(
            self.model,
            *arguments,
            calls=calls,
            other_calls=outermost_calls(other, choice.units) if other is not None else None,
            names=self.modules,
            batch_sizes=sizes,
            batch_of=reading.size_of if reading is not None else lambda _: sizes[0],
            dynamic_shapes=reading.dynamic_shapes(arguments) if reading is not None else None,
            packed=observation.packed,
        )

    def close(self, error: Exception, choice: UnitChoice, observation: Observation, closed: set[str]) -> bool:
        """Make the submodule in whose code tracing failed a unit, if it is small enough; whether that was done."""
        name = getattr(error, "inside", None) or failing_module(error, self.model, choice.opened)
        if not name or len(closed) >= _MOST_RETRIES:
            return False
        work = sum(call.macs for call in observation.calls if call.name == name)
        named = not isinstance(self.units, str) and any(unit.startswith(name + ".") for unit in self.units)
        if named or 2 * work > observation.macs > 0:
            return False
        closed.add(name)
        self.notes.append(f"{name} is kept whole: its own code can't be traced ({reason_of(error)})")
        return True

    def unit_calls(self, observation: Observation, choice: UnitChoice) -> tuple[UnitCall, ...]:
        """Name every unit call, with the repeated block that it lies in."""
        blocks = repeated_blocks(self.model, observation)
        times: dict[str, int] = {}
        found: list[UnitCall] = []
        block_calls = _enclosing_blocks(observation, blocks)
        for call in outermost_calls(observation, choice.units):
            nth = times[call.name] = times.get(call.name, 0) + 1
            found.append(
                UnitCall(
                    index=len(found),
                    name=call.name if nth == 1 else f"{call.name}@{nth}",
                    target=call.name,
                    kind=type(self.modules[call.name]).__name__,
                    block=block_calls.get(id(call)),
                )
            )
        return tuple(found)


def _same_calls(first: Observation, second: Observation) -> bool:
    """Whether two runs made the same calls with the same structures."""

    def outline(call: CallForm) -> tuple[Any, ...]:
        kinds = tuple(isinstance(leaf, TensorForm) for leaf in call.out_leaves)
        ranks = tuple(len(leaf.shape) for leaf in call.out_leaves if isinstance(leaf, TensorForm))
        return call.name, call.out_spec, kinds, ranks

    return [outline(call) for call in first.calls] == [outline(call) for call in second.calls]


def _enclosing_blocks(observation: Observation, blocks: frozenset[str]) -> dict[int, str]:
    """For each call (by identity), the name of the repeated block's call that it is or lies in."""
    times: dict[str, int] = {}
    inside: list[str | None] = []
    found: dict[int, str] = {}
    for call in observation.calls:
        block = inside[call.parent] if call.parent is not None else None
        if block is None and call.name in blocks:
            nth = times[call.name] = times.get(call.name, 0) + 1
            block = call.name if nth == 1 else f"{call.name}@{nth}"
        inside.append(block)
        if block is not None:
            found[id(call)] = block
    return found
