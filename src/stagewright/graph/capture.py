"""Capture a model: observe an eager run, choose the units, trace the glue operations between them, put the units back.

If tracing fails inside an opened submodule (because it branches on tensor values, for example), that submodule becomes
one unit and tracing restarts, as long as it holds less than half of the work. Otherwise the error names the location
and a fix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from stagewright import structure
from stagewright.errors import CaptureError, UsageError
from stagewright.graph.equivalence import find_difference, is_repeatable, mix_samples
from stagewright.graph.preserve import preserved
from stagewright.graph.symbolic_shapes import is_constant
from stagewright.graph.tracing.assemble import assemble
from stagewright.graph.tracing.batch_layout import (
    Arguments,
    BatchLayout,
    candidate_layouts,
    guess_batch_dims,
    normalize_arguments,
)
from stagewright.graph.tracing.carried import find_uncarried, find_varying_numbers, has_frozen_numbers
from stagewright.graph.tracing.cheap_products import cheap_products
from stagewright.graph.tracing.hidden_state import run_with_hidden_state
from stagewright.graph.tracing.observation import Observation, contradicts_layers, observe, same_calls
from stagewright.graph.tracing.packed_sequences import explain_packed
from stagewright.graph.tracing.trace import Trace, trace
from stagewright.graph.tracing.trace_errors import explain_failure, failure_reason, find_failing_module
from stagewright.graph.unit_graph import UnitGraph
from stagewright.graph.unit_selection import (
    UnitSelection,
    choose_units,
    has_backward_hooks,
    name_calls,
    outermost_calls,
)
from stagewright.machine.cpu_offload import offloaded
from stagewright.machine.hollow import is_hollow_model

_MAX_RETRIES = 12


class StageList(nn.Module):
    """A user's list of stages: each takes the result of the previous one (a tuple as several arguments)."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        for index, stage in enumerate(stages):
            self.add_module(str(index), stage)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stages in order."""
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
    *,
    name: str | None = None,
) -> UnitGraph:
    """Capture a model as a graph of its units, in its current mode (train or eval); its state is preserved.

    Args:
        model: The model; or a list of modules, one a stage.
        args: Positional arguments of one forward call, with two samples or more if possible.
        kwargs: Keyword arguments of that call.
        units: ``"auto"`` (whole blocks), ``"leaf"`` (the finest granularity) or a list of modules to keep whole.
        batch_dim: The batch dimension of the inputs, detected by default.
        name: The model's name in tables, by default its class name.

    Example:
        graph = sw.capture(model, (x,))
        print(graph)
        assert torch.equal(graph(x), model(x))
    """
    if not isinstance(model, nn.Module):
        stages = list(model) if isinstance(model, (list, tuple)) else []
        if not stages or not all(isinstance(stage, nn.Module) for stage in stages):
            raise UsageError(f"capture takes an nn.Module or a list of them, not {type(model).__name__}")
        model, units = StageList(stages), [str(index) for index in range(len(stages))]
    if next(model.parameters(), None) is None:
        raise UsageError(f"{type(model).__name__} has no parameters, so there is nothing to place on devices")
    lazy = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise UsageError(f"{lazy!r} of {type(model).__name__} is not initialized yet; run one batch through it first")
    arguments = normalize_arguments(args, kwargs)
    if batch_dim is not None and not candidate_layouts(arguments, (batch_dim,)):
        raise UsageError(f"batch_dim is {batch_dim}, but no input has that many dimensions")
    devices = [leaf.device for leaf in structure.leaves(arguments) if isinstance(leaf, torch.Tensor)]
    batch_dims = guess_batch_dims(model) if batch_dim is None else (batch_dim,)
    with preserved(model), offloaded(model, devices[0] if devices else torch.device("cpu")):
        return _run(_Capture(model, arguments, units, batch_dims, name or type(model).__name__))


def capture_fixed(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], units: str | Sequence[str], batch_size: int
) -> UnitGraph:
    """Capture a model for the shapes of one batch, whose number of samples no dimension tells (lists of samples)."""
    arguments = normalize_arguments(args, kwargs)
    with preserved(model):
        return _run(_Capture(model, arguments, units, (), type(model).__name__, fixed_size=batch_size))


def _run(attempt: _Capture) -> UnitGraph:
    """Capture the model; once more with padded sequences if it packs them where a graph can't hold them."""
    try:
        return attempt.run()
    except CaptureError as error:
        if not attempt.packs_sequences:
            raise
        attempt.padded, attempt.notes = True, []
        try:
            return attempt.run()
        except CaptureError as padded_error:
            raise explain_packed(attempt.model, error, padded_error) from padded_error


class _Capture:
    """One capture, with its retries."""

    def __init__(
        self,
        model: nn.Module,
        arguments: Arguments,
        units: str | Sequence[str],
        batch_dims: Sequence[int],
        name: str,
        fixed_size: int | None = None,
    ) -> None:
        """``fixed_size``: the number of samples in the arguments, if the graph is for this one alone."""
        self.model = model
        self.name = name
        self.batch_dims = batch_dims
        self.fixed_size = fixed_size
        self.arguments = arguments
        self.units = units
        self.packs_sequences = False
        self.padded = False  # keep packed sequences between units padded
        self.notes: list[str] = []
        self.modules = dict(model.named_modules(remove_duplicate=False))

    def run(self) -> UnitGraph:
        observed = self.observe()
        self.packs_sequences = observed[0].packs_sequences
        closed = self.unrepeatable(*observed[:2])
        graph, problem = self.build(*observed, closed, carry_all=False)
        if problem is not None and any(has_frozen_numbers(call) for call in observed[0].calls):
            graph, problem = self.build(*observed, closed, carry_all=True)
        if problem is not None:
            raise CaptureError(
                f"can't capture {type(self.model).__name__}: {problem}; the code between units depends on something "
                "that can't be traced (requires_grad, a size that is not proportional to the batch); keep it inside a "
                "unit, or give a list of stages"
            )
        return graph

    def build(
        self,
        observation: Observation,
        second: Observation | None,
        layout: BatchLayout | None,
        arguments: Arguments,
        sizes: tuple[int, int],
        closed: set[str],
        *,
        carry_all: bool,
    ) -> tuple[UnitGraph, str | None]:
        """Trace the model and return its graph, with how it differs from the model.

        With ``carry_all`` no number that a unit returns is assumed to be the same in every call.
        """
        while True:
            selection = choose_units(self.model, observation, self.units, closed)
            try:
                self.check_results(selection, observation, second, carry_all)
                traced = self.trace(selection, observation, second, layout, arguments, sizes)
                if not self.close_specialized(traced, selection, observation, closed):
                    break
            except Exception as error:  # anything that torch.export or the model raises
                if isinstance(error, UsageError) and not isinstance(error, CaptureError):
                    raise
                if not self.close(error, selection, observation, closed):
                    raise explain_failure(error, self.model) from error
        assembled = assemble(traced)
        guards = [guard for guard in traced.guards if not all(map(guard.holds_at, range(1, 65)))]
        inputs = [node.meta.get("val") for node in assembled.graph.nodes if node.op == "placeholder"]
        dynamic = layout is not None and not any(is_constant(size) for size in layout.sizes_of(inputs))
        if not dynamic:
            self.add_note(f"works for a batch of {sizes[0]} only: the model's code depends on that size")
        batch_size = layout.batch_size if layout is not None and dynamic else sizes[0]
        training_flags = {name: self.modules[name].training for name in sorted(selection.opened)}
        graph = UnitGraph(
            model=self.model,
            name=self.name,
            calls=name_calls(self.model, observation, selection),
            assembled=assembled,
            inputs=inputs,
            batch_size=batch_size,
            dynamic=dynamic,
            training_flags=training_flags,
            notes=tuple(self.notes),
            guards=guards,
            recapture=lambda: self.repeat(layout),
        )
        return graph, self.verify(graph, layout if dynamic else None, arguments, sizes, observation.macs)

    def repeat(self, layout: BatchLayout | None) -> UnitGraph:
        """Capture the model again, in its mode at that time."""
        if self.fixed_size is not None:
            return capture_fixed(self.model, *self.arguments, self.units, self.fixed_size)
        return capture(self.model, *self.arguments, self.units, layout.dim if layout else None, name=self.name)

    def close_specialized(
        self, traced: Trace, selection: UnitSelection, observation: Observation, closed: set[str]
    ) -> bool:
        """Turn the submodules whose code fixes the batch size into units; return whether there were any."""
        has_closed = False
        for name in sorted((traced.specialized & selection.opened) - {""}):
            error = CaptureError("it uses the batch size as a plain number")
            error.inside = name
            has_closed |= self.close(error, selection, observation, closed)
        return has_closed

    def add_note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def verify(
        self, graph: UnitGraph, layout: BatchLayout | None, arguments: Arguments, sizes: tuple[int, int], macs: int
    ) -> str | None:
        """Compare the graph with the model on different values, and on a batch size that was not observed.

        In train mode gradients are compared too, on the smaller of the two batches. On the other one, products are not
        computed if the model has many ``macs``. A hollow model has no values to compare, and its gradients would have
        the size of the whole model.
        """
        if is_hollow_model(self.model):
            return None
        batches = {sizes[0]: arguments if layout is None else mix_samples(arguments, layout.dim, layout.leaves)}
        new_size = 2 * sizes[0] + 1
        if layout is not None and graph.guards_hold(new_size):
            batches[new_size] = mix_samples(layout.resized(self.arguments, new_size), layout.dim, layout.leaves)
        checked = {tuple(True for _ in graph.guards)}
        for size in range(1, 65):
            answers = tuple(guard.holds_at(size) for guard in graph.guards)
            # The smallest batch that takes these branches, checked now, while all parameters are available.
            if layout is not None and answers not in checked:
                checked.add(answers)
                graph.check_guards(*mix_samples(layout.resized(self.arguments, size), layout.dim, layout.leaves))
        for size, (args, kwargs) in batches.items():
            gradients = self.model.training and size == sizes[0]
            with cheap_products(macs=0 if size == sizes[0] else macs):
                problem = find_difference(self.model, graph, args, kwargs, with_gradients=gradients)
            if problem is not None:
                return f"with {size} samples the graph differs from the model ({problem})"
        return None

    def unrepeatable(self, observation: Observation, second: Observation | None) -> set[str]:
        """Return the submodules to keep whole because their code has side effects that a graph would lose."""
        effects = {**observation.side_effects, **(second.side_effects if second is not None else {})}
        root = effects.pop("", None)
        if root is not None and ("random" in root or "hook" in root):
            raise CaptureError(
                f"can't capture {type(self.model).__name__}: its forward {root}, which a graph would lose; move that "
                "code into a submodule (or draw random numbers with torch)"
            )
        if root is not None and not is_repeatable(self.model, *self.arguments):
            raise CaptureError(
                f"can't capture {type(self.model).__name__}: its forward {root}, and its results depend on that; "
                "keep such a value in a buffer, or move that code into a submodule"
            )
        if has_backward_hooks(self.model):
            raise CaptureError(
                f"can't capture {type(self.model).__name__}: it has a backward hook, which stages would lose"
            )
        self.notes.extend(f"{name} is kept whole: its forward {effect}" for name, effect in effects.items())
        return set(effects)

    def check_results(
        self, selection: UnitSelection, observation: Observation, second: Observation | None, carry_all: bool
    ) -> None:
        """Mark the numbers that vary; reject units with results or effects that no graph can hold."""
        runs = (observation, second if second is not None else observation)
        for call, repeated in zip(*(outermost_calls(run, selection.units) for run in runs), strict=True):
            problem = find_uncarried(call, repeated)
            if problem is not None:
                error = CaptureError(problem)
                error.inside = observation.calls[call.parent].name if call.parent is not None else ""
                raise error
            call.varying = find_varying_numbers(call, None if carry_all else repeated)

    def observe(self) -> tuple[Observation, Observation | None, BatchLayout | None, Arguments, tuple[int, int]]:
        """Run the model at two batch sizes, for each possible batch dimension until one works."""
        problem: Exception | None = None
        unlikely = None
        layouts = candidate_layouts(self.arguments, self.batch_dims) if self.fixed_size is None else []
        for layout in layouts:
            example_size = max(layout.batch_size, 2)
            candidates = [(2, 3), (example_size, example_size + 1), (example_size, 2 * example_size)]
            for base, size in dict.fromkeys(candidates):
                try:
                    arguments = layout.resized(self.arguments, base)
                    first = observe(self.model, *arguments, padded=self.padded)
                    second = observe(self.model, *layout.resized(self.arguments, size), padded=self.padded)
                except Exception as error:  # anything that the model raises
                    problem = problem or error
                    continue
                if same_calls(first, second):
                    observed = first, second, layout, arguments, (base, size)
                    if layout.dim == 0 or not contradicts_layers(self.modules, first, second):
                        return observed
                    unlikely = unlikely or observed
        if unlikely is not None:
            return unlikely
        try:
            observation = observe(self.model, *self.arguments, padded=self.padded)
        except Exception as error:
            shapes = [
                f"{list(leaf.shape)} {leaf.dtype}"
                for leaf in structure.leaves(self.arguments)
                if hasattr(leaf, "shape")
            ]
            raise CaptureError(
                f"{type(self.model).__name__} fails on the example ({', '.join(shapes)}): "
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            ) from error
        if self.fixed_size is not None:
            return observation, None, None, self.arguments, (self.fixed_size, self.fixed_size + 1)
        size = next((layout.batch_size for layout in layouts), 1)
        self.notes.append(
            "no other batch size was tested: the model does not run at another one"
            + (f" ({type(problem).__name__}: {problem})" if problem else "")
        )
        return observation, None, None, self.arguments, (size, size + 1)

    def trace(
        self,
        selection: UnitSelection,
        observation: Observation,
        second: Observation | None,
        layout: BatchLayout | None,
        arguments: Arguments,
        sizes: tuple[int, int],
    ) -> Trace:
        calls = outermost_calls(observation, selection.units)
        if not calls:
            raise UsageError(
                f"{type(self.model).__name__} is a single unit, without submodules to cut between; "
                "put it into an nn.Sequential with the modules before or after it"
            )
        return run_with_hidden_state(
            [self.modules[call.name] for call in calls],
            lambda hidden: trace(
                self.model,
                *arguments,
                calls=calls,
                other_calls=outermost_calls(second, selection.units) if second is not None else None,
                names=self.modules,
                batch_sizes=sizes,
                batch_of=layout.size_of if layout is not None else lambda _: sizes[0],
                dynamic_shapes=layout.dynamic_shapes(arguments) if layout is not None else None,
                packed=observation.packed,
                hidden=hidden,
                padded=self.padded,
            ),
        )

    def close(self, error: Exception, selection: UnitSelection, observation: Observation, closed: set[str]) -> bool:
        """Turn the submodule in which tracing failed into a unit if it is small enough; return whether it was."""
        name = getattr(error, "inside", None) or find_failing_module(error, self.model, selection.opened)
        if not name or name in closed or len(closed) >= _MAX_RETRIES:
            return False
        work = sum(call.macs for call in observation.calls if call.name == name)
        named = not isinstance(self.units, str) and any(unit.startswith(name + ".") for unit in self.units)
        if named or 2 * work > observation.macs > 0:
            return False
        closed.add(name)
        self.notes.append(f"{name} is kept whole: its forward can't be traced ({failure_reason(error)})")
        return True
