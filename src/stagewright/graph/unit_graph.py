"""The unit graph: a model as calls of its units, in order, with the glue operations between them.

It is called like the model and returns bit-identical results. It knows its cuts and crossing tensors, and builds
stages. If the model's mode (``train``/``eval``) has changed since capture, the model is captured again in that mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any

import torch
from torch import fx, nn

from stagewright import structure
from stagewright.display import Displayed
from stagewright.errors import UsageError
from stagewright.graph.contexts import exit_all_contexts
from stagewright.graph.crossing_tensors import find_crossings
from stagewright.graph.cut import Crossing, Cut, UnitCall
from stagewright.graph.equivalence import find_difference
from stagewright.graph.glue.operations import Glue, analyze_glue
from stagewright.graph.glue.segments import RecordedGlue, record_glue
from stagewright.graph.preserve import preserved
from stagewright.graph.stage import Stage, build_stage
from stagewright.graph.symbolic_shapes import batch_dim, num_bytes, shape_at
from stagewright.graph.tracing.assemble import AssembledGraph
from stagewright.graph.tracing.batch_layout import check_input, outline
from stagewright.graph.tracing.guards import BatchSizeGuard
from stagewright.machine.hollow import is_hollow_model, skip_products
from stagewright.quantity import format_bytes, format_count
from stagewright.table import Table, number_columns, text_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """A unit call with its recorded arguments, as they are before the call."""

    call: UnitCall
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class UnitGraph(Displayed):
    """A captured model, made by ``stagewright.capture``."""

    def __init__(
        self,
        *,
        model: nn.Module,
        name: str,
        calls: tuple[UnitCall, ...],
        assembled: AssembledGraph,
        inputs: list[Any],
        batch_size: int,
        dynamic: bool,
        training_flags: Mapping[str, bool],
        notes: tuple[str, ...],
        guards: Sequence[BatchSizeGuard],
        recapture: Callable[[], UnitGraph],
    ) -> None:
        self.model = model
        self.name = name
        """Name of the model in tables."""
        self.calls = calls
        """The unit calls, in order."""
        self.batch_size = batch_size
        """Samples in the example batch; sizes of crossing tensors refer to it."""
        self.dynamic = dynamic
        """Whether other batch sizes work."""
        self.notes = notes
        """Remarks of capture, such as modules that it had to keep whole."""
        self.guards = tuple(guards)
        self._checked: dict[tuple[bool, ...], bool] = {}
        self._assembled = assembled
        self._inputs = inputs
        self._opened_names = tuple(training_flags)
        self._opened = [model.get_submodule(module) for module in training_flags]
        self._training_flags = tuple(training_flags.values())
        self._recapture = recapture
        self._other_modes: dict[tuple[bool, ...], UnitGraph] = {}
        self._glue: Glue = analyze_glue(assembled.graph, model)
        self._crossings = find_crossings(self._glue, batch_size)
        self.cuts: tuple[Cut, ...] = tuple(
            Cut(
                index=index,
                after=calls[index].name,
                before=calls[index + 1].name,
                crossing=tuple(self._crossing(node) for node in nodes),
            )
            for index, nodes in enumerate(self._crossings)
        )
        """The positions between two calls, in order, with the tensors that cross each."""
        self._whole = self.stage(0, len(calls) - 1)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model through its graph."""
        graph = self._in_current_mode()
        graph._whole.refresh_buffers()
        results = graph._whole(*graph.flatten(args, kwargs))
        return graph.unflatten(results)

    def __repr__(self) -> str:
        return f"UnitGraph({self.name}, {len(self.calls)} unit calls, batch {self.batch_size})"

    def table(self) -> Table:
        """Tabulate the unit calls, with the tensors that cross a cut after each."""
        rows = []
        for call in self.calls:
            crossing = self.cuts[call.index].crossing if call.index < len(self.cuts) else ()
            tensors = ", ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in crossing)
            num_bytes = format_bytes(self.cuts[call.index].num_bytes) if crossing else "–"
            values = {id(value): value for value in self.parameters_of(call).values()}
            count = format_count(sum(value.numel() for value in values.values()))
            rows.append((str(call.index), call.name, call.kind, call.block or "", count, num_bytes, tensors))
        mode = "train" if self.model.training else "eval"
        return Table(
            title=f"{self.name}: {len(self.calls)} unit calls, batch {self.batch_size}, {mode} mode",
            columns=(
                *number_columns("call"),
                *text_columns("unit", "kind", "block"),
                *number_columns("parameters", "crossing"),
                *text_columns("crossing tensors", wrap=True),
            ),
            rows=tuple(rows),
            notes=self.notes,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the unit calls and cuts as plain values for JSON."""
        return {
            "model": self.name,
            "batch_size": self.batch_size,
            "dynamic": self.dynamic,
            "calls": [asdict(call) for call in self.calls],
            "cuts": [{**asdict(cut), "num_bytes": cut.num_bytes} for cut in self.cuts],
            "notes": list(self.notes),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state dict."""
        return self.model.state_dict()

    def module(self, call: UnitCall) -> nn.Module:
        """Return the original module of a call."""
        return self.model.get_submodule(call.target)

    def bound_to(self, model: nn.Module) -> UnitGraph:
        """Return this graph for another model with modules of the same names."""
        graph = UnitGraph(
            model=model,
            name=self.name,
            calls=self.calls,
            assembled=self._assembled,
            inputs=self._inputs,
            batch_size=self.batch_size,
            dynamic=self.dynamic,
            training_flags=dict(zip(self._opened_names, self._training_flags, strict=True)),
            notes=self.notes,
            guards=self.guards,
            recapture=self._recapture,
        )
        graph._checked = self._checked
        return graph

    @property
    def keywords(self) -> list[str]:
        """Names of the keyword arguments at capture."""
        return self._assembled.in_spec.children[1].keys

    @property
    def example_inputs(self) -> Sequence[Any]:
        """The flattened inputs as traced."""
        return self._inputs

    def inputs_batch_dim(self) -> int | None:
        """Return the batch dimension of the inputs; ``None`` if the batch size is fixed."""
        return next((dim for dim in self.input_batch_dims() if dim is not None), None)

    def fsdp_units(self) -> list[nn.Module]:
        """Return the modules whose parameters FSDP gathers together."""
        return [self.module(call) for call in self.calls]

    def input_batch_dims(self) -> tuple[int | None, ...]:
        """Return the batch dimension of each flattened input; None for an input without one."""
        return tuple(batch_dim(value) if isinstance(value, torch.Tensor) else None for value in self._inputs)

    def parameters_of(self, call: UnitCall) -> dict[str, nn.Parameter]:
        """Return the parameters that a call needs: those of its module and those that nearby glue operations read."""
        parameters = {f"{call.target}.{name}": value for name, value in self.module(call).named_parameters()}
        for name, index in self._glue_parameters.items():
            if index == call.index:
                parameters.setdefault(name, self.model.get_parameter(name))
        return parameters

    @property
    def _glue_parameters(self) -> dict[str, int]:
        """Parameters that glue operations read, with the index of the last unit call before the first read."""
        names = dict(self.model.named_parameters(remove_duplicate=False))
        units = [self._glue.position[unit] for unit in self._glue.units]
        call_indices: dict[str, int] = {}
        for node in self._glue.nodes:
            if node.op == "get_attr" and node.target in names:
                read = min(self._glue.position[user] for user in node.users)
                earlier = [index for index, position in enumerate(units) if position < read]
                call_indices[str(node.target)] = max(earlier, default=0)
        return call_indices

    def batch_size_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> int:
        """Return the number of samples in a batch."""
        return self._samples_in(self.leaves(args, kwargs or {}))

    def _samples_in(self, leaves: Sequence[Any]) -> int:
        for leaf, example in zip(leaves, self._inputs, strict=True):
            dim = batch_dim(example) if isinstance(example, torch.Tensor) else None
            if dim is not None:
                return int(leaf.shape[dim])
        return self.batch_size

    def crossing_bytes(self, cut: int, batch_size: int) -> int:
        """Return the bytes that cross a cut at a batch size."""
        return sum(num_bytes(node.meta["val"], batch_size) for node in self._crossings[cut])

    def crossing_shapes(self, cut: int, batch_size: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each tensor that crosses a cut at a batch size."""
        values = [node.meta["val"] for node in self._crossings[cut]]
        return [(shape_at(value, batch_size), value.dtype) for value in values]

    def needs_gradient(self, cut: int) -> tuple[bool, ...]:
        """Return for each tensor that crosses a cut whether its gradient is sent back, given the frozen parameters."""
        differentiable = self._glue.needs_gradient(self.model)
        return tuple(node in differentiable for node in self._crossings[cut])

    def stage(self, first: int, last: int) -> Stage:
        """Build the stage of the unit calls ``first`` to ``last``, both included."""
        if not 0 <= first <= last < len(self.calls):
            raise UsageError(f"no stage from unit {first} to {last}: the model has units 0 to {len(self.calls) - 1}")
        current = self._in_current_mode()
        if current is not self:
            return current.stage(first, last)
        final = last == len(self.calls) - 1
        placeholders = [node for node in self._glue.nodes if node.op == "placeholder"]
        return build_stage(
            self._glue,
            self.model,
            self._assembled.constants,
            self.calls,
            first=first,
            last=last,
            received=placeholders if first == 0 else self._crossings[first - 1],
            sent=None if final else self._crossings[last],
            inputs=() if first == 0 else self.cuts[first - 1].crossing,
            outputs=() if final else self.cuts[last].crossing,
        )

    def stages(self, cuts: Sequence[int]) -> list[Stage]:
        """Build the stages between the given cuts, in order."""
        if list(cuts) != sorted(set(cuts)) or any(not 0 <= cut < len(self.cuts) for cut in cuts):
            raise UsageError(f"cuts {list(cuts)} must be increasing and between 0 and {len(self.cuts) - 1}")
        starts = [0, *(cut + 1 for cut in cuts)]
        ends = [*cuts, len(self.calls) - 1]
        return [self.stage(first, last) for first, last in zip(starts, ends, strict=True)]

    def record(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Iterator[RecordedCall]:
        """Run the graph node by node; yield each unit call with its arguments before it runs."""
        graph = self._in_current_mode()
        whole = graph._whole
        whole.refresh_buffers()
        env: dict[fx.Node, Any] = {}
        inputs = iter(graph.flatten(args, dict(kwargs or {})))
        calls = iter(graph.calls)
        with exit_all_contexts():
            for node in whole.graph.nodes:
                if node.op == "placeholder":
                    env[node] = next(inputs)
                elif node.op == "get_attr":
                    env[node] = reduce(getattr, str(node.target).split("."), whole)
                elif node.op in ("call_module", "call_function"):
                    node_args = fx.map_arg(node.args, env.__getitem__)
                    node_kwargs = fx.map_arg(node.kwargs, env.__getitem__)
                    run: Any = node.target
                    if node.op == "call_module":
                        run = reduce(getattr, str(node.target).split("."), whole)
                        yield RecordedCall(
                            call=next(calls), module=run, args=tuple(node_args), kwargs=dict(node_kwargs)
                        )
                    env[node] = run(*node_args, **node_kwargs)

    def record_glue(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Iterator[RecordedGlue]:
        """Run the graph node by node; yield the segments of glue operations, each with the unit that it counts for."""
        graph = self._in_current_mode()
        inputs = graph.flatten(args, dict(kwargs or {}))
        return record_glue(graph._glue, graph.model, graph._assembled.constants, graph._crossings, inputs)

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Flatten the user's arguments for the first stage, and check them against the example."""
        expected = self._assembled.in_spec.children[1].keys
        if sorted(kwargs) != sorted(expected):
            raise UsageError(f"captured with keyword arguments {sorted(expected)}, called with {sorted(kwargs)}")
        leaves, spec = structure.flatten((tuple(args), {name: kwargs[name] for name in expected}))
        if spec != self._assembled.in_spec:
            raise UsageError(
                f"captured with arguments of structure {outline(self._inputs)}, called with {outline(leaves)}"
            )
        sizes: dict[int, int] = {}
        for index, (leaf, example) in enumerate(zip(leaves, self._inputs, strict=True)):
            check_input(index, leaf, example)
            dim = batch_dim(example) if isinstance(example, torch.Tensor) else None
            if dim is not None:
                sizes[index] = int(leaf.shape[dim])
        if len(set(sizes.values())) > 1:
            raise UsageError(f"all inputs of the example had the same batch size; these have {sizes} (by input)")
        if self.guards:
            self._check_branches(self._samples_in(leaves), args, kwargs)
        return leaves

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Flatten arguments without the checks of ``flatten``."""
        expected = self.keywords
        if sorted(kwargs) != sorted(expected):
            raise UsageError(f"captured with keyword arguments {sorted(expected)}, called with {sorted(kwargs)}")
        leaves = structure.leaves((tuple(args), {name: kwargs[name] for name in expected}))
        if len(leaves) != len(self._inputs):
            raise UsageError(
                f"captured with arguments of structure {outline(self._inputs)}, called with {outline(leaves)}"
            )
        return leaves

    def guards_hold(self, batch_size: int) -> bool:
        """Whether the model takes the same branches for this batch size as for the example."""
        return all(branch.holds_at(batch_size) for branch in self.guards)

    def check_guards(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Run graph and model to find out whether they agree for batches that take the same branches as this one."""
        leaves = structure.leaves((tuple(args), dict(kwargs)))
        answers = tuple(guard.holds_at(self._samples_in(leaves)) for guard in self.guards)
        self._checked[answers] = True  # for the run below
        try:
            with skip_products() if is_hollow_model(self.model) else nullcontext():
                with preserved(self.model), torch.no_grad():
                    self.model(*_copies(args), **_copies(dict(kwargs)))
                self._checked[answers] = find_difference(self.model, self, args, kwargs) is None
        except Exception:  # the model does not run on these inputs, or no longer in this process
            self._checked[answers] = False

    def _check_branches(self, size: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Reject a batch size for which the model takes another branch with different results.

        A branch may be harmless (an ``expand`` that a single sample does not need): one run of both finds out.
        """
        answers = tuple(guard.holds_at(size) for guard in self.guards)
        if all(answers):
            return
        if answers not in self._checked:
            self.check_guards(args, kwargs)
        if not self._checked[answers]:
            guard = self.guards[answers.index(False)]
            raise UsageError(
                f"with {size} samples the model takes another branch at {guard.location} than with the "
                f"{self.batch_size} of the example; capture it with a batch of that size"
            )

    def unflatten(self, results: Sequence[Any]) -> Any:
        """Restore the structure of the model's result from the last stage's flat results."""
        return self._assembled.out_spec.unflatten(list(results))

    def example_result(self) -> Any:
        """Return the model's result as traced: tensors with shape and dtype but without values."""
        (output,) = (node for node in self._assembled.graph.nodes if node.op == "output")
        return self.unflatten([value.meta["val"] if isinstance(value, fx.Node) else value for value in output.args[0]])

    def _crossing(self, node: fx.Node) -> Crossing:
        value = node.meta["val"]
        return Crossing(
            name=node.name,
            shape=shape_at(value, self.batch_size),
            dtype=str(value.dtype).removeprefix("torch."),
            item_bytes=value.dtype.itemsize,
            batch_dim=batch_dim(value),
        )

    def _in_current_mode(self) -> UnitGraph:
        """Return this graph, or one captured in the current mode of the opened modules."""
        flags = tuple(module.training for module in self._opened)
        if flags == self._training_flags:
            return self
        if flags not in self._other_modes:
            self._other_modes[flags] = self._recapture()
        return self._other_modes[flags]


def _copies(value: Any) -> Any:
    return structure.map_tensors(torch.clone, value)
