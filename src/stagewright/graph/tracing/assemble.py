"""Put the units back: from an exported program with opaque operators to a graph that calls the original modules.

    exported                                       assembled
    p_model_cls   : placeholder (parameter)        cls  : get_attr "cls"
    args_0        : placeholder (user input)       args_0 : placeholder
    unit(3, [x, m], [b])                           layer.3 : call_module "layer.3" (x, attention_mask=m)
    getitem(unit, 0)                               the call itself, or a part of its result
    wrap_with_set_grad_enabled(False, body, …)     the nodes of the body, marked with GradMode(False)
    _assert_…                                      –

Each node keeps the traced value in ``meta["val"]``. Unit calls have ``meta["call"]`` (their index), glue operations in
a context have ``meta["contexts"]``, and nodes that write to inputs have ``meta["mutates"]`` (the written nodes).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind

from stagewright import structure
from stagewright.errors import CaptureError
from stagewright.graph.contexts import Autocast, GradMode
from stagewright.graph.symbolic_shapes import depends_only_on_batch
from stagewright.graph.tracing.observation import TensorSpec
from stagewright.graph.tracing.packed_sequences import pad_results, padded_steps, rebuild_packed
from stagewright.graph.tracing.trace import UNIT_OPERATOR, Trace, TracedCall, number_dtype
from stagewright.structure import Structure

ROOT = "model."  # the name under which the traced root holds the user's model
CONSTANT = "stagewright_constant_"
_ASSERTIONS = ("_assert_", "sym_constrain_range", "_functional_sym_constrain_range", "_functional_assert_async")
_BASE_TYPES = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(slots=True, kw_only=True)
class AssembledGraph:
    """The graph of unit calls and glue operations."""

    graph: fx.Graph
    """Placeholders are the flattened user inputs; the output node holds the flattened results."""
    in_spec: Structure
    """Structure of the user's ``(args, kwargs)``."""
    out_spec: Structure
    """Structure of the model's result."""
    constants: dict[str, Any] = field(default_factory=dict)
    """Objects of ``get_attr`` nodes that are not attributes of the model."""


def pick_leaf(value: Any, position: int) -> Any:
    """Return a leaf of a structure that indexing can't reach."""
    return structure.leaves(value, records=True)[position]


def assemble(trace: Trace) -> AssembledGraph:
    """Build the graph of original modules from a trace."""
    return _Assembler(trace).run()


class _Assembler:
    """A copier of the exported graph, node by node; a value of ``env`` is a node or a plain object."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.program = trace.program
        self.graph = fx.Graph()
        self.result = AssembledGraph(graph=self.graph, in_spec=trace.in_spec, out_spec=trace.out_spec)
        self.attributes: dict[str, fx.Node] = {}
        self.inputs = iter(trace.inputs)

    def run(self) -> AssembledGraph:
        program = self.program
        lifted = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        env: dict[fx.Node, Any] = {}
        for node in program.graph.nodes:
            if node.op == "placeholder":
                env[node] = self.placeholder(node, lifted[node.name])
        outputs = self.copy(program.graph_module, env, contexts=())
        self.outputs(outputs)
        self.move_buffer_accesses()
        self.graph.lint()
        return self.result

    def placeholder(self, node: fx.Node, spec: Any) -> Any:
        """Keep user inputs as placeholders; turn lifted tensors into attributes at their first use."""
        if spec.kind is InputKind.USER_INPUT:
            new = self.graph.placeholder(node.name)
            given = next(self.inputs)
            new.meta["val"] = node.meta.get("val") if isinstance(given, torch.Tensor) else given
            return new
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target.startswith(ROOT):
            return _Lazy(spec.target.removeprefix(ROOT), node.meta.get("val"))
        value = self.program.constants.get(spec.target)
        if value is None:
            raise CaptureError(f"the code between units uses {spec.target!r}, which is not a parameter or buffer")
        return self.constant(value, node.meta.get("val"))

    def constant(self, value: Any, traced: Any = None) -> Any:
        """Return a value as it is, or a reference to a constant if an fx graph can't hold it."""
        if isinstance(value, _BASE_TYPES):
            return value
        name = f"{CONSTANT}{len(self.result.constants)}"
        self.result.constants[name] = value
        return _Lazy(name, traced)

    def attribute(self, lazy: _Lazy) -> fx.Node:
        """Return the node that reads an attribute, created once at the start of the graph."""
        if lazy.name not in self.attributes:
            first = next((node for node in self.graph.nodes if node.op not in ("placeholder", "get_attr")), None)
            point = self.graph.inserting_before(first) if first is not None else self.graph.inserting_before()
            with point:
                node = self.graph.create_node("get_attr", lazy.name)
            node.meta["val"] = lazy.value
            self.attributes[lazy.name] = node
        return self.attributes[lazy.name]

    def copy(self, module: fx.GraphModule, env: dict[fx.Node, Any], contexts: tuple[Any, ...]) -> Any:
        """Copy all nodes of a (sub-)graph; return its output with nodes replaced."""

        def value(node: fx.Node) -> Any:
            new = env[node]
            return self.attribute(new) if isinstance(new, _Lazy) else new

        for node in module.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                return fx.map_arg(node.args[0], value)
            if node.op == "get_attr":
                env[node] = _Lazy(str(node.target), None, getattr(module, str(node.target)))
                continue
            env[node] = self.function(node, value, env, contexts)
        return ()

    def function(
        self, node: fx.Node, value: Callable[[fx.Node], Any], env: dict[fx.Node, Any], contexts: tuple[Any, ...]
    ) -> Any:
        """Copy one ``call_function`` node."""
        name = getattr(node.target, "__name__", str(node.target))
        if name.startswith(_ASSERTIONS):
            return None
        if node.target is UNIT_OPERATOR:
            return self.unit(node, value, contexts)
        higher = (
            getattr(torch.ops.higher_order, name, None) if not isinstance(node.target, torch._ops.OpOverload) else None
        )
        if name == "wrap_with_set_grad_enabled" and higher is node.target:
            enabled, body, *rest = node.args
            return self.inline(
                body, env, [fx.map_arg(arg, value) for arg in rest], (*contexts, GradMode(bool(enabled)))
            )
        if name == "wrap_with_autocast" and higher is node.target:
            device, dtype, enabled, cache, body, *rest = node.args
            inner = (*contexts, Autocast(str(device), dtype, bool(enabled), cache))  # type: ignore[arg-type]
            return self.inline(body, env, [fx.map_arg(arg, value) for arg in rest], inner)
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            source = env[node.args[0]]
            if isinstance(source, (list, tuple)):
                return source[node.args[1]]  # type: ignore[index]
        bodies = [
            arg for arg in node.args if isinstance(arg, fx.Node) and isinstance(env[arg], _Lazy) and env[arg].body
        ]
        if bodies:
            raise CaptureError(f"the code between units uses torch's {name} operator, which can't be placed in a stage")
        new = self.graph.call_function(node.target, fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value))  # type: ignore[arg-type]
        new.meta["val"] = node.meta.get("val")
        new.meta["contexts"] = contexts
        new.meta["stack_trace"] = node.meta.get("stack_trace")
        new.meta["mutates"] = _written(new)
        return new

    def inline(self, body: Any, env: dict[fx.Node, Any], args: list[Any], contexts: tuple[Any, ...]) -> Any:
        """Copy the nodes of a wrapped sub-graph in place of the wrapper."""
        module = env[body].body
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        return self.copy(module, dict(zip(inputs, args, strict=True)), contexts)

    def unit(self, node: fx.Node, value: Callable[[fx.Node], Any], contexts: tuple[Any, ...]) -> list[Any]:
        """Replace the opaque operator with a call of the original module; return its tensor leaves."""
        number, tensors, sizes = node.args
        call = self.trace.calls[int(number)]  # type: ignore[arg-type]
        tensors, sizes = fx.map_arg(tensors, value), fx.map_arg(sizes, value)
        leaves: list[Any] = []
        for index, (kind, value_or_index) in enumerate(call.leaves):
            if kind == "tensor":
                leaf = tensors[value_or_index]  # type: ignore[index]
                leaves.append(None if index in call.absent and not _reads_data(leaf) else leaf)
            elif kind == "number":
                leaves.append(self.graph.call_function(_to_number, (tensors[value_or_index],)))  # type: ignore[index]
            elif kind == "size":
                leaves.append(sizes[value_or_index])  # type: ignore[index]
            else:
                constant = self.constant(value_or_index)
                leaves.append(self.attribute(constant) if isinstance(constant, _Lazy) else constant)
        args, kwargs = self.arguments(leaves, call)
        new = self.graph.call_module(call.spec.name, args, kwargs)
        new.meta["call"] = int(number)  # type: ignore[arg-type]
        new.meta["contexts"] = contexts
        new.meta["mutates"] = frozenset(
            leaves[index] for index in call.spec.mutated if index < len(leaves) and isinstance(leaves[index], fx.Node)
        )
        steps = padded_steps(call.spec.out_spec, call.spec.out_leaves) if self.trace.padded else ()
        result = self.graph.call_function(pad_results, (new, steps)) if steps else new
        result.meta["contexts"] = contexts
        return self.results(result, call, node.meta["val"], leaves)

    def arguments(self, leaves: list[Any], call: TracedCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Rebuild a call's arguments; structures that fx can't hold are rebuilt when the graph runs."""
        args_spec, kwargs_spec = call.in_spec.children
        rebuilt: list[Any] = []
        start = 0
        for spec in (*args_spec.children, *kwargs_spec.children):
            part = leaves[start : start + spec.num_leaves]
            start += spec.num_leaves
            if spec.is_builtin:
                rebuilt.append(spec.unflatten(part))
            else:
                constant = self.attribute(self.constant(spec))
                rebuild = rebuild_packed if self.trace.padded else _rebuild
                rebuilt.append(self.graph.call_function(rebuild, (constant, part)))
        num_args = len(args_spec.children)
        return tuple(rebuilt[:num_args]), dict(zip(kwargs_spec.keys, rebuilt[num_args:], strict=True))

    def results(self, new: fx.Node, call: TracedCall, values: list[Any], leaves: list[Any]) -> list[Any]:
        """Return the tensor leaves of the unit's result, each as a node; a number that varies as a tensor."""
        spec = call.spec
        new.meta["val"] = None
        results: list[Any] = []
        for position, leaf in enumerate(spec.out_leaves):
            if not isinstance(leaf, TensorSpec) and position not in spec.varying:
                continue
            part = new
            steps = _path(spec.out_spec, position)
            if steps is None:
                part = self.graph.call_function(pick_leaf, (new, position))
            for step in steps or ():
                part = self.graph.call_function(operator.getitem, (part, step))
                part.meta["val"] = None
            if position in spec.varying:
                part.meta["val"] = None
                part = self.graph.call_function(_to_tensor, (part, number_dtype(leaf)))
                part.meta["contexts"] = (*new.meta["contexts"], GradMode(False))
            else:
                part.meta["alias_of"] = _node(leaves, spec.aliases.get(position))
            part.meta["val"] = values[len(results)]
            results.append(part)
        return results

    def outputs(self, outputs: Any) -> None:
        """Write the output node; buffers that export returns as results are written back instead."""
        specs = self.program.graph_signature.output_specs
        traced = []
        for spec, value in zip(specs, outputs, strict=True):
            if spec.kind is OutputKind.USER_OUTPUT:
                traced.append(value)
            elif spec.kind is OutputKind.BUFFER_MUTATION and spec.target is not None:
                buffer = self.attribute(_Lazy(spec.target.removeprefix(ROOT), None))
                write = self.graph.call_function(torch.ops.aten.copy_.default, (buffer, value))
                write.meta["mutates"] = frozenset([buffer])
            elif spec.kind is not OutputKind.USER_INPUT_MUTATION:
                raise CaptureError(
                    f"the model changes {spec.target!r} in a way that export can't express ({spec.kind.name})"
                )
        results = []
        for kind, position in self.trace.outputs:
            leaf = traced[position] if kind == "traced" else self.constant(position)
            results.append(self.attribute(leaf) if isinstance(leaf, _Lazy) else leaf)
        self.graph.output(tuple(results))

    def move_buffer_accesses(self) -> None:
        """Move the read of a replaced buffer right before its first use, and the write as early as possible.

        Export traces ``self.mean = 0.9 * self.mean + …`` with the write at the end of the graph. A stage can hold such
        a buffer only if the read and the write are close together.
        """
        order = {node: index for index, node in enumerate(self.graph.nodes)}
        mutated = [target for node in self.graph.nodes for target in node.meta.get("mutates", ())]
        written = {target for target in mutated if target.op == "get_attr"}
        for write in [node for node in self.graph.nodes if node.target is torch.ops.aten.copy_.default]:
            buffer, value = write.args[0], write.args[1]
            if not isinstance(buffer, fx.Node) or buffer.op != "get_attr" or write.users:
                continue
            earlier = [user for user in buffer.users if user is not write]
            if isinstance(value, fx.Node):
                earlier.append(value)
            if earlier:
                max(earlier, key=order.__getitem__).append(write)
        order = {node: index for index, node in enumerate(self.graph.nodes)}
        for buffer in written:
            min(buffer.users, key=order.__getitem__).prepend(buffer)


@dataclass(slots=True)
class _Lazy:
    """An attribute that gets a node at its first use."""

    name: str
    value: Any
    body: Any = None


def _rebuild(spec: Structure, leaves: list[Any]) -> Any:
    """Rebuild a structured argument (a dataclass, a ModelOutput) when the graph runs."""
    return spec.unflatten(leaves)


def _to_tensor(number: float, dtype: torch.dtype) -> torch.Tensor:
    """Convert a number to a tensor that can cross a cut."""
    return torch.tensor(number, dtype=dtype)


def _to_number(tensor: torch.Tensor) -> Any:
    return tensor.item()


def _path(spec: Structure, position: int) -> list[Any] | None:
    """Return the indices that lead to a leaf through tuples, lists and dictionaries, if that is possible."""
    if spec.is_leaf:
        return []
    if spec.container not in (tuple, list, dict):
        return None
    for key, child in zip(spec.keys, spec.children, strict=True):
        if position < child.num_leaves:
            rest = _path(child, position)
            return None if rest is None else [key, *rest]
        position -= child.num_leaves
    return None


def _node(leaves: list[Any], index: int | None) -> fx.Node | None:
    """Return the leaf at an index if it is a node."""
    leaf = leaves[index] if index is not None and index < len(leaves) else None
    return leaf if isinstance(leaf, fx.Node) else None


def _written(node: fx.Node) -> frozenset[fx.Node]:
    """Return the argument nodes that an operator writes to."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return frozenset()
    written: set[fx.Node] = set()
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            written.update(leaf for leaf in structure.leaves(value) if isinstance(leaf, fx.Node))
    return frozenset(written)


def _reads_data(leaf: Any) -> bool:
    """Whether a value depends on the values of inputs or unit results, not only on their sizes."""
    todo, seen = [leaf], set()
    while todo:
        node = todo.pop()
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        if node.op in ("placeholder", "call_module"):
            return True
        if depends_only_on_batch(node.meta.get("val")):
            continue
        todo.extend(node.all_input_nodes)
    return False
