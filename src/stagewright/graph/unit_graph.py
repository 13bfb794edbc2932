"""The unit graph: a model as calls of its own units, in order, with the few tensor operations between them.

It is called like the model and gives the same result to the last bit; it knows its cuts and what crosses them, and
builds stages. If the model's mode (``train``/``eval``) has changed since capture, it is captured again in that mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from stagewright.errors import UsageError
from stagewright.graph.check import difference
from stagewright.graph.contexts import all_left
from stagewright.graph.crossing import crossings
from stagewright.graph.glue import Glue, analyse
from stagewright.graph.glue_pieces import RecordedPiece, record_pieces
from stagewright.graph.preserve import preserved
from stagewright.graph.stage import Stage, build_stage
from stagewright.graph.symbols import batch_dim, is_fixed, num_bytes, shape_at
from stagewright.graph.tracing.assemble import Assembled
from stagewright.graph.tracing.untraceable import Branch
from stagewright.graph.values import Crossing, Cut, UnitCall

__all__ = ["RecordedCall", "UnitGraph"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One unit call with the real arguments it got."""

    call: UnitCall
    """Which call."""
    module: nn.Module
    """The original module."""
    args: tuple[Any, ...]
    """Positional arguments, as they were before the call."""
    kwargs: dict[str, Any]
    """Keyword arguments."""


class UnitGraph:
    """A captured model. Make one with ``stagewright.graph``."""

    def __init__(
        self,
        *,
        model: nn.Module,
        calls: tuple[UnitCall, ...],
        assembled: Assembled,
        inputs: list[Any],
        batch_size: int,
        dynamic: bool,
        flags: Mapping[str, bool],
        notes: tuple[str, ...],
        branches: Sequence[Branch],
        recapture: Callable[[], UnitGraph],
    ) -> None:
        self.model = model
        self.calls = calls
        """The unit calls, in order."""
        self.batch_size = batch_size
        """Samples in the example batch; sizes of crossings are given for it."""
        self.dynamic = dynamic
        """Whether other batch sizes work."""
        self.notes = notes
        """What capture had to do differently from what one might expect."""
        self.branches = tuple(branches)
        self._checked: dict[tuple[bool, ...], bool] = {}
        self._assembled = assembled
        self._inputs = inputs
        self._opened = [model.get_submodule(name) for name in flags]
        self._flags = tuple(flags.values())
        self._recapture = recapture
        self._other_modes: dict[tuple[bool, ...], UnitGraph] = {}
        self._glue: Glue = analyse(assembled.graph, model)
        self._crossings = crossings(self._glue, batch_size)
        self.cuts: tuple[Cut, ...] = tuple(
            Cut(
                index=at,
                after=calls[at].name,
                before=calls[at + 1].name,
                crossing=tuple(self._describe(node) for node in nodes),
            )
            for at, nodes in enumerate(self._crossings)
        )
        """The places between two calls, in order, with what crosses each."""
        self._whole = self.stage(0, len(calls) - 1)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model through its graph."""
        graph = self._in_current_mode()
        graph._whole.refresh_buffers()
        results = graph._whole(*graph.flatten(args, kwargs))
        return graph.unflatten(results)

    def __repr__(self) -> str:
        return f"UnitGraph({type(self.model).__name__}, {len(self.calls)} unit calls, batch {self.batch_size})"

    def state_dict(self) -> dict[str, Any]:
        """The model's own state, under its own names."""
        return self.model.state_dict()

    def module(self, call: UnitCall) -> nn.Module:
        """The original module of a call."""
        return self.model.get_submodule(call.target)

    def parameters_of(self, call: UnitCall) -> dict[str, nn.Parameter]:
        """Parameters that a call needs where it is placed: its module's own and those that the glue around it reads."""
        found = {f"{call.target}.{name}": value for name, value in self.module(call).named_parameters()}
        for name, place in self._glue_parameters.items():
            if place == call.index:
                found.setdefault(name, self.model.get_parameter(name))
        return found

    @property
    def _glue_parameters(self) -> dict[str, int]:
        """Parameters read by glue, with the unit call behind whose predecessor that glue lies."""
        names = dict(self.model.named_parameters(remove_duplicate=False))
        units = [self._glue.position[unit] for unit in self._glue.units]
        found: dict[str, int] = {}
        for node in self._glue.nodes:
            if node.op == "get_attr" and node.target in names:
                at = min(self._glue.position[user] for user in node.users)
                found[str(node.target)] = max([index for index, start in enumerate(units) if start < at], default=0)
        return found

    def batch_size_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> int:
        """The number of samples in a batch, read where the example's was."""
        return self._samples_in(self.flatten(args, kwargs or {}))

    def _samples_in(self, leaves: Sequence[Any]) -> int:
        for leaf, example in zip(leaves, self._inputs, strict=True):
            dim = batch_dim(example) if isinstance(example, torch.Tensor) else None
            if dim is not None:
                return int(leaf.shape[dim])
        return self.batch_size

    def crossing_bytes(self, cut: int, batch_size: int) -> int:
        """Bytes that cross a cut at another batch size than the example's."""
        return sum(num_bytes(node.meta["val"], batch_size) for node in self._crossings[cut])

    def crossing_shapes(self, cut: int, batch_size: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each value that crosses a cut at a batch size."""
        values = [node.meta["val"] for node in self._crossings[cut]]
        return [(shape_at(value, batch_size), value.dtype) for value in values]

    def needs_gradient(self, cut: int) -> tuple[bool, ...]:
        """For each value that crosses a cut, whether its gradient must travel back, as parameters are frozen now."""
        flowing = self._glue.needs_gradient(self.model)
        return tuple(node in flowing for node in self._crossings[cut])

    def stage(self, first: int, last: int) -> Stage:
        """The unit calls ``first`` to ``last`` (both included) as a module from one crossing to the next."""
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
        """The stages that lie between the given cuts, in order."""
        if list(cuts) != sorted(set(cuts)) or any(not 0 <= cut < len(self.cuts) for cut in cuts):
            raise UsageError(f"cuts {list(cuts)} must rise and lie between 0 and {len(self.cuts) - 1}")
        starts = [0, *(cut + 1 for cut in cuts)]
        ends = [*cuts, len(self.calls) - 1]
        return [self.stage(first, last) for first, last in zip(starts, ends, strict=True)]

    def record(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Iterator[RecordedCall]:
        """Run the graph step by step; before each unit call, yield it with the real arguments it is about to get."""
        graph = self._in_current_mode()
        whole = graph._whole
        whole.refresh_buffers()
        env: dict[fx.Node, Any] = {}
        inputs = iter(graph.flatten(args, dict(kwargs or {})))
        number = 0
        with all_left():
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
                            call=graph.calls[number],
                            module=run,
                            args=tuple(node_args),
                            kwargs=dict(node_kwargs),
                        )
                        number += 1
                    env[node] = run(*node_args, **node_kwargs)

    def record_between(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Iterator[RecordedPiece]:
        """Run the graph step by step; yield what is done between units, with the unit that it goes with."""
        graph = self._in_current_mode()
        inputs = graph.flatten(args, dict(kwargs or {}))
        return record_pieces(graph._glue, graph.model, graph._assembled.constants, graph._crossings, inputs)

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The user's arguments as the flat list that the first stage takes, checked against the example."""
        expected = self._assembled.in_spec.children()[1].context
        if sorted(kwargs) != sorted(expected):
            raise UsageError(f"captured with keyword arguments {sorted(expected)}, called with {sorted(kwargs)}")
        leaves, spec = pytree.tree_flatten((tuple(args), {name: kwargs[name] for name in expected}))
        if spec != self._assembled.in_spec:
            raise UsageError(
                f"captured with arguments of structure {_outline(self._inputs)}, called with {_outline(leaves)}"
            )
        sizes: dict[int, int] = {}
        for at, (leaf, example) in enumerate(zip(leaves, self._inputs, strict=True)):
            self._check_input(at, leaf, example)
            dim = batch_dim(example) if isinstance(example, torch.Tensor) else None
            if dim is not None:
                sizes[at] = int(leaf.shape[dim])
        if len(set(sizes.values())) > 1:
            raise UsageError(f"all inputs of the example had one batch size; these have {sizes} (by input)")
        if self.branches:
            self._check_branches(self._samples_in(leaves), args, kwargs)
        return leaves

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The same flat list, of arguments like others that ``flatten`` has checked."""
        expected = self._assembled.in_spec.children()[1].context
        return pytree.tree_leaves((tuple(args), {name: kwargs[name] for name in expected}))

    def holds_for(self, batch_size: int) -> bool:
        """Whether the model's code takes the same branches for a batch of this size as for the example."""
        return all(branch.holds_at(batch_size) for branch in self.branches)

    def try_branches(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Find out, by running both, whether graph and model agree for batches that branch as this one does."""
        leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
        answers = tuple(branch.holds_at(self._samples_in(leaves)) for branch in self.branches)
        self._checked[answers] = True  # for the run below
        try:
            with preserved(self.model), torch.no_grad():
                self.model(*_copies(args), **_copies(dict(kwargs)))
            self._checked[answers] = difference(self.model, self, args, kwargs) is None
        except Exception:  # the model can't tell: it does not run on these, or not here any more
            self._checked[answers] = False

    def _check_branches(self, size: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A batch size for which the model's code takes another branch must give the model's results all the same.

        Where it does (an ``expand`` that one sample does not need), that is found out once, by running both.
        """
        answers = tuple(branch.holds_at(size) for branch in self.branches)
        if all(answers):
            return
        if answers not in self._checked:
            self.try_branches(args, kwargs)
        if not self._checked[answers]:
            branch = self.branches[answers.index(False)]
            raise UsageError(
                f"with {size} samples the model takes another branch at {branch.place} than with the {self.batch_size} "
                "of the example; capture it with a batch of that size"
            )

    def unflatten(self, results: Sequence[Any]) -> Any:
        """The last stage's flat results in the structure that the model returns."""
        return pytree.tree_unflatten(list(results), self._assembled.out_spec)

    def example_result(self) -> Any:
        """What the model returns, as capture saw it: tensors without values, which tell shape and type."""
        (output,) = (node for node in self._assembled.graph.nodes if node.op == "output")
        return self.unflatten([one.meta["val"] if isinstance(one, fx.Node) else one for one in output.args[0]])

    def _check_input(self, at: int, leaf: Any, example: Any) -> None:
        """One input against the traced one: sizes may differ only where the batch's may."""
        if not isinstance(example, torch.Tensor):
            if type(leaf) is not type(example) or leaf != example:
                raise UsageError(
                    f"input {at} was {example!r} at capture, is {leaf!r} now; capture again with the new value"
                )
            return
        if not isinstance(leaf, torch.Tensor):
            raise UsageError(f"input {at} was a tensor at capture, is {type(leaf).__name__} now")
        shape = [int(size) if is_fixed(size) else "batch" for size in example.shape]
        same = leaf.ndim == len(shape) and all(
            known in ("batch", size) for size, known in zip(leaf.shape, shape, strict=True)
        )
        if not same or leaf.dtype != example.dtype:
            raise UsageError(
                f"input {at} has shape {list(leaf.shape)} and type {leaf.dtype}, but the graph was captured for "
                f"{shape} and {example.dtype}; capture again with an example of the new shape"
            )

    def _describe(self, node: fx.Node) -> Crossing:
        value = node.meta["val"]
        return Crossing(
            name=node.name,
            shape=shape_at(value, self.batch_size),
            dtype=str(value.dtype).removeprefix("torch."),
            item_bytes=value.dtype.itemsize,
            batch_dim=batch_dim(value),
        )

    def _in_current_mode(self) -> UnitGraph:
        """This graph, or one captured in the mode in which the opened modules are now."""
        flags = tuple(module.training for module in self._opened)
        if flags == self._flags:
            return self
        if flags not in self._other_modes:
            self._other_modes[flags] = self._recapture()
        return self._other_modes[flags]


def _copies(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.clone, value)


def _outline(leaves: Sequence[Any]) -> str:
    """A short description of flat arguments for an error message."""
    shown = [f"tensor{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
    return "(" + ", ".join(shown) + ")"
