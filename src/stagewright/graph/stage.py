"""A stage: the unit calls between two cuts, as an ``nn.Module`` from one crossing to the next.

    Stage(0)                    Stage(1)                       Stage(2)
    user inputs ─► units … ─► crossing of cut a ─► units … ─► crossing of cut b ─► units … ─► flattened results

The forward is generated from the graph: the pinned nodes of the stage, the cheap glue operations that they need, and
the batch size read from a received tensor. Parameters and buffers are those of the user's model, under their names.
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
from stagewright.graph.contexts import enter_context, exit_all_contexts, exit_context
from stagewright.graph.cut import Crossing, UnitCall
from stagewright.graph.glue.operations import Glue
from stagewright.graph.symbolic_shapes import as_linear

_numbers = itertools.count()


class Stage(nn.Module):
    """Consecutive unit calls with the glue operations that they need."""

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
        self.write_forward()
        self._buffer_owners: list[tuple[nn.Module, nn.Module, str]] = []
        self._has_contexts = any(node.target is enter_context for node in graph.nodes)
        self.variant = 0
        """Which forward to run: 0 is this stage's own, others are for inputs of other shapes."""
        self._variants: list[Stage] = []

    def write_forward(self) -> None:
        """Generate the code that runs, again after a change of the graph."""
        code = self.graph.python_code(root_module="self")
        name = f"<stagewright stage {next(_numbers)}>"
        linecache.cache[name] = (len(code.src), None, code.src.splitlines(keepends=True), name)
        scope = dict(code.globals)
        exec(compile(code.src, name, "exec"), scope)
        self._run = scope["forward"]

    def add_variant(self, stage: Stage) -> None:
        """Add a stage of the same units for inputs of another shape; it uses this stage's modules and parameters."""
        names, other_names = (dict(owner.named_parameters()).keys() for owner in (self, stage))
        if names == other_names:
            vars(stage)["_modules"], vars(stage)["_parameters"] = self._modules, self._parameters
        self._variants.append(stage)

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Map the values of one crossing (or the flattened inputs) to those of the next (or the flattened results)."""
        if self.variant:
            variant = self._variants[self.variant - 1]
            return Stage.forward(variant, *inputs)
        if not self._has_contexts:
            return self._run(self, *inputs)  # type: ignore[no-any-return]
        with exit_all_contexts():
            return self._run(self, *inputs)  # type: ignore[no-any-return]

    def refresh_buffers(self) -> None:
        """Use the model's current buffers, because a model may replace them (``self.count = self.count + 1``)."""
        for holder, owner, name in self._buffer_owners:
            holder._buffers[name] = owner._buffers[name]


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
    """Build the stage of unit calls ``first`` … ``last``; with ``sent=None`` it returns the model's results."""
    start = 0 if first == 0 else glue.position[glue.units[first]]
    stop = len(glue.nodes) if sent is None else glue.position[glue.units[last + 1]]
    for node in received if start > 0 else ():
        if node.op == "get_attr" and glue.written_between(node, start - 1, stop):
            raise UsageError(
                f"the buffer {node.target!r} is read before {calls[first].name} and written after it, so no stage "
                "can hold it; cut elsewhere"
            )
    writer = _Writer(glue, received, start, stop)
    graph = writer.write(sent)
    stage = Stage(graph, calls=tuple(calls[first : last + 1]), inputs=inputs, outputs=outputs)
    _attach(stage, graph, model, {**constants, **writer.contexts}, writer.renamed)
    return stage


class _Writer:
    """The writer of one stage's graph."""

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
        segment = glue.nodes[self.start : self.stop]
        pinned = [node for node in segment if node in glue.pinned and node.op != "placeholder"]
        results = list(sent) if sent is not None else list(glue.nodes[-1].all_input_nodes)
        for node in self.order([*pinned, *results]):
            if glue.is_size(node):
                self.new[node] = self.size(node)
            elif node.op != "output":
                self.switch(node.meta.get("contexts", ()))
                self.new[node] = self.graph.node_copy(node, self.new.__getitem__)
                self.rename(self.new[node])
        self.switch(())
        output = tuple(self.new[node] for node in results) if sent is not None else self.output()
        self.graph.output(output)
        return self.graph

    def output(self) -> Any:
        return fx.map_arg(self.glue.nodes[-1].args[0], self.new.__getitem__)

    def rename(self, node: fx.Node) -> None:
        """Rename targets that contain a keyword, because generated code can't contain ``self.class``."""
        target = str(node.target)
        if node.op in ("call_module", "get_attr") and any(keyword.iskeyword(part) for part in target.split(".")):
            node.target = f"stagewright_name_{len(self.renamed)}"
            self.renamed[node.target] = target

    def order(self, wanted: list[fx.Node]) -> list[fx.Node]:
        """Return all nodes that must be computed here, in the graph's order."""
        seen: set[fx.Node] = set()
        todo = [node for node in wanted if node not in self.new]
        while todo:
            node = todo.pop()
            if node in seen or node in self.new:
                continue
            seen.add(node)
            if self.glue.is_size(node) and as_linear(node.meta["val"]) is not None:
                continue  # determined by the batch size alone
            todo.extend(node.all_input_nodes)
        return sorted(seen, key=self.glue.position.__getitem__)

    def size(self, node: fx.Node) -> Any:
        """Compute a size from the batch size of a received tensor."""
        line = as_linear(node.meta["val"])
        if line is None:
            return self.graph.node_copy(node, self.new.__getitem__)
        slope, constant = line
        if slope == 0:
            return constant
        if self.batch is None:
            self.batch = self.read_batch()
        scaled = self.graph.call_function(_multiply, (self.batch, slope)) if slope != 1 else self.batch
        return self.graph.call_function(_add, (scaled, constant)) if constant else scaled

    def read_batch(self) -> fx.Node:
        """Read the batch size from the first received tensor with a batch dimension."""
        for source in self.graph.nodes:
            value = source.meta.get("val") if source.op == "placeholder" else None
            if not isinstance(value, torch.Tensor):
                continue
            for dim, size in enumerate(value.shape):
                line = as_linear(size)
                if line is not None and line[0] != 0:
                    return self.graph.call_function(_batch_size, (source, dim, *line))
        raise UsageError(
            "no tensor that crosses into this stage has a batch dimension, but the stage needs the batch size; cut "
            "elsewhere, or keep the code that changes the batch inside one unit"
        )

    def switch(self, contexts: tuple[Any, ...]) -> None:
        """Exit and enter contexts so that exactly ``contexts`` are open."""
        common = 0
        while common < min(len(self.open), len(contexts)) and self.open[common] == contexts[common]:
            common += 1
        for _ in self.open[common:]:
            self.graph.call_function(exit_context)
        for context in contexts[common:]:
            name = f"stagewright_context_{len(self.contexts)}"
            self.contexts[name] = context
            self.graph.call_function(enter_context, (self.graph.create_node("get_attr", name),))
        self.open = contexts


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """Clone a leaf that requires a gradient, because autograd forbids changing it in place."""
    return tensor.clone() if tensor.requires_grad and tensor.is_leaf else tensor


def _batch_size(tensor: torch.Tensor, dim: int, slope: int, constant: int) -> int:
    """Compute the batch size from a size that is slope · batch + constant."""
    return (tensor.size(dim) - constant) // slope


def _multiply(size: int, factor: int) -> int:
    return size * factor


def _add(size: int, constant: int) -> int:
    return size + constant


def _attach(
    stage: Stage, graph: fx.Graph, model: nn.Module, constants: dict[str, Any], renamed: dict[str, str]
) -> None:
    """Register the user's modules, parameters and buffers under their names, and the constants of the graph."""
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
    """Register one module, parameter or buffer of the model under the same qualified name in the stage."""
    *path, leaf = target.split(".")
    holder: nn.Module = stage
    owner: nn.Module = model
    for part in path:
        owner = getattr(owner, part)
        if part not in holder._modules:
            holder.add_module(part, nn.Module())
        holder = getattr(holder, part)
        if holder is owner:
            return  # inside a unit that is registered already
    value = getattr(owner, leaf)
    if isinstance(value, nn.Module):
        holder.add_module(leaf, value)
    elif isinstance(value, nn.Parameter):
        holder.register_parameter(leaf, value)
    elif leaf not in holder._buffers:
        holder.register_buffer(leaf, value, persistent=leaf not in owner._non_persistent_buffers_set)
        stage._buffer_owners.append((holder, owner, leaf))
