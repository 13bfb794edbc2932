"""A stage: the unit calls between two cuts as an ``nn.Module`` that takes one crossing and returns the next.

    Stage(0)                    Stage(1)                       Stage(2)
    user inputs ─► units … ─► crossing of cut a ─► units … ─► crossing of cut b ─► units … ─► flattened results

The forward is generated from the graph: pinned nodes of the stage, whatever cheap glue they need rebuilt, and the batch
size read back from a received tensor. Parameters and buffers are the user's own, under the user's own names.
"""

from __future__ import annotations

import itertools
import keyword
import linecache
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import fx, nn

from stagewright.errors import UsageError
from stagewright.graph.contexts import all_left, enter, leave
from stagewright.graph.glue import Glue
from stagewright.graph.symbols import linear
from stagewright.graph.values import Crossing, UnitCall

__all__ = ["Stage", "build_stage"]

_numbers = itertools.count()


class Stage(nn.Module):
    """Consecutive unit calls with the glue they need."""

    def __init__(
        self,
        graph: fx.Graph,
        *,
        calls: tuple[UnitCall, ...],
        inputs: tuple[Crossing, ...],
        outputs: tuple[Crossing, ...],
    ) -> None:
        super().__init__()
        self.calls = calls
        self.inputs = inputs
        self.outputs = outputs
        self.graph = graph
        code = graph.python_code(root_module="self")
        name = f"<stagewright stage {next(_numbers)}>"
        linecache.cache[name] = (len(code.src), None, code.src.splitlines(keepends=True), name)
        scope = dict(code.globals)
        exec(compile(code.src, name, "exec"), scope)
        self._run = scope["forward"]
        self._buffer_homes: list[tuple[nn.Module, nn.Module, str]] = []
        self._has_contexts = any(node.target is enter for node in graph.nodes)

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Take the values of one crossing (or the flattened user inputs), return those of the next (or the results)."""
        if not self._has_contexts:
            return self._run(self, *inputs)  # type: ignore[no-any-return]
        with all_left():
            return self._run(self, *inputs)  # type: ignore[no-any-return]

    def refresh_buffers(self) -> None:
        """Take the model's buffers as they are now: a model may replace them (``self.count = self.count + 1``)."""
        for here, there, name in self._buffer_homes:
            here._buffers[name] = there._buffers[name]


def build_stage(
    glue: Glue,
    model: nn.Module,
    constants: dict[str, Any],
    calls: Sequence[UnitCall],
    *,
    first: int,
    last: int,
    received: Sequence[fx.Node],
    sent: Sequence[fx.Node] | None,
    inputs: tuple[Crossing, ...] = (),
    outputs: tuple[Crossing, ...] = (),
) -> Stage:
    """The stage of unit calls ``first`` … ``last``; ``sent=None`` means that it returns the model's results."""
    start = 0 if first == 0 else glue.position[glue.units[first]]
    stop = len(glue.nodes) if sent is None else glue.position[glue.units[last + 1]]
    for node in received if start > 0 else ():
        if node.op == "get_attr" and glue.written_between(node, start - 1, stop):
            raise UsageError(
                f"the buffer {node.target!r} is read before {calls[first].name} and written behind it, so no stage "
                "can hold it; cut elsewhere"
            )
    writer = _Writer(glue, received, start, stop)
    graph = writer.write(sent)
    stage = Stage(graph, calls=tuple(calls[first : last + 1]), inputs=inputs, outputs=outputs)
    _attach(stage, graph, model, {**constants, **writer.contexts}, writer.renamed)
    return stage


class _Writer:
    """Writes the graph of one stage."""

    def __init__(self, glue: Glue, received: Sequence[fx.Node], start: int, stop: int) -> None:
        self.glue = glue
        self.start, self.stop = start, stop
        self.graph = fx.Graph()
        self.new: dict[fx.Node, Any] = {}
        self.batch: fx.Node | None = None
        self.open: tuple[Any, ...] = ()
        self.contexts: dict[str, Any] = {}
        self.renamed: dict[str, str] = {}
        for node in received:
            copy = self.graph.placeholder(node.name)
            copy.meta = dict(node.meta)
            self.new[node] = copy
        for node in received if start > 0 else ():
            if glue.written_between(node, start - 1, stop):
                self.new[node] = self.graph.call_function(_writable, (self.new[node],))

    def write(self, sent: Sequence[fx.Node] | None) -> fx.Graph:
        glue = self.glue
        own = [node for node in glue.nodes[self.start : self.stop] if node in glue.pinned and node.op != "placeholder"]
        results = list(sent) if sent is not None else list(glue.nodes[-1].all_input_nodes)
        for node in self.order([*own, *results]):
            if glue.is_size(node):
                self.new[node] = self.size(node)
            elif node.op != "output":
                self.switch(node.meta.get("contexts", ()))
                self.new[node] = self.graph.node_copy(node, lambda one: self.new[one])
                self.rename(self.new[node])
        self.switch(())
        output = tuple(self.new[node] for node in results) if sent is not None else self.mapped(glue.nodes[-1].args[0])
        self.graph.output(output)
        return self.graph

    def rename(self, node: fx.Node) -> None:
        """Reach a module called ``class`` or ``in`` by another name: generated code can't write ``self.class``."""
        target = str(node.target)
        if node.op in ("call_module", "get_attr") and any(keyword.iskeyword(part) for part in target.split(".")):
            node.target = f"stagewright_name_{len(self.renamed)}"
            self.renamed[node.target] = target

    def order(self, wanted: list[fx.Node]) -> list[fx.Node]:
        """Everything that must be computed here, in the graph's order."""
        seen: set[fx.Node] = set()
        todo = [node for node in wanted if node not in self.new]
        while todo:
            node = todo.pop()
            if node in seen or node in self.new:
                continue
            seen.add(node)
            if self.glue.is_size(node) and linear(node.meta["val"]) is not None:
                continue  # follows from the batch size alone
            todo.extend(node.all_input_nodes)
        return sorted(seen, key=self.glue.position.__getitem__)

    def size(self, node: fx.Node) -> Any:
        """A number that follows from the batch size, rebuilt from a tensor that is here."""
        line = linear(node.meta["val"])
        if line is None:
            return self.graph.node_copy(node, lambda one: self.new[one])
        slope, constant = line
        if slope == 0:
            return constant
        if self.batch is None:
            self.batch = self.read_batch()
        scaled = self.graph.call_function(_multiply, (self.batch, slope)) if slope != 1 else self.batch
        return self.graph.call_function(_add, (scaled, constant)) if constant else scaled

    def read_batch(self) -> fx.Node:
        """The batch size, from the first received tensor that shows it."""
        for source in self.graph.nodes:
            value = source.meta.get("val") if source.op == "placeholder" else None
            if not isinstance(value, torch.Tensor):
                continue
            for dim, size in enumerate(value.shape):
                line = linear(size)
                if line is not None and line[0] != 0:
                    return self.graph.call_function(_batch_size, (source, dim, *line))
        raise UsageError(
            "nothing that crosses into this stage shows the batch size, which its code needs; cut elsewhere, or keep "
            "the code that changes the batch inside one unit"
        )

    def switch(self, contexts: tuple[Any, ...]) -> None:
        """Leave and enter contexts so that exactly ``contexts`` are open."""
        common = 0
        while common < min(len(self.open), len(contexts)) and self.open[common] == contexts[common]:
            common += 1
        for _ in self.open[common:]:
            self.graph.call_function(leave)
        for context in contexts[common:]:
            name = f"stagewright_context_{len(self.contexts)}"
            self.contexts[name] = context
            self.graph.call_function(enter, (self.graph.create_node("get_attr", name),))
        self.open = contexts

    def mapped(self, value: Any) -> Any:
        return fx.map_arg(value, lambda node: self.new[node])


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """A received value that the stage is about to change: autograd forbids that for a leaf that needs a gradient."""
    return tensor.clone() if tensor.requires_grad and tensor.is_leaf else tensor


def _batch_size(tensor: torch.Tensor, dim: int, slope: int, constant: int) -> int:
    """Read the batch size back from a size that is slope · batch + constant."""
    return (tensor.size(dim) - constant) // slope


def _multiply(size: int, factor: int) -> int:
    return size * factor


def _add(size: int, constant: int) -> int:
    return size + constant


def _attach(
    stage: Stage, graph: fx.Graph, model: nn.Module, constants: dict[str, Any], renamed: dict[str, str]
) -> None:
    """Give the stage the user's modules, parameters and buffers under their own names, and its constants."""
    nodes = [node for node in graph.nodes if node.op in ("call_module", "get_attr")]
    targets = {renamed.get(str(node.target), str(node.target)): node.op for node in nodes}
    for target in sorted(targets, key=lambda name: (targets[name] != "call_module", name.count("."), name)):
        if target not in constants:
            _attach_named(stage, model, target)
        elif isinstance(constants[target], torch.Tensor):
            stage.register_buffer(target, constants[target], persistent=False)
        else:
            object.__setattr__(stage, target, constants[target])
    for name, target in renamed.items():
        object.__setattr__(stage, name, reduce(getattr, target.split("."), stage))


def _attach_named(stage: Stage, model: nn.Module, target: str) -> None:
    """Hang one module, parameter or buffer of the model at the same place in the stage."""
    *path, leaf = target.split(".")
    here: nn.Module = stage
    there: nn.Module = model
    for part in path:
        there = getattr(there, part)
        if part not in here._modules:
            here.add_module(part, nn.Module())
        here = getattr(here, part)
        if here is there:
            return  # inside a unit that is here already
    value = getattr(there, leaf)
    if isinstance(value, nn.Module):
        here.add_module(leaf, value)
    elif isinstance(value, nn.Parameter):
        here.register_parameter(leaf, value)
    elif leaf not in here._buffers:
        here.register_buffer(leaf, value, persistent=leaf not in there._non_persistent_buffers_set)
        stage._buffer_homes.append((here, there, leaf))
