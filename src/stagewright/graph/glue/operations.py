"""Glue: the fx graph of operations between units, and which of them run once or in every stage that needs them.

A node is *pinned* if it must run exactly once, at its position: unit calls, random numbers, in-place writes, heavy
arithmetic, and reads of a parameter (so that no parameter is held twice). All other nodes are cheap and pure; each
stage that needs them recomputes them.

Writes are tracked by *alias set* (a tensor and its views). A read before a write to its alias set must not be
recomputed after that write, and neither must the tensor that was written to.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils.flop_counter import flop_registry

from stagewright.graph.contexts import GradMode
from stagewright.graph.symbolic_shapes import depends_only_on_batch, has_known_shape

_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal", "poisson", "exponential", "rrelu", "uniform")
_HEAVY = ("matmul", "linear", "einsum", "conv", "attention", "lstm", "gru", "rnn", "fft", "bilinear", "tensordot")
_MAY_ALIAS = ("dropout", "alpha_dropout", "feature_dropout")  # return their input in eval mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Glue:
    """The analyzed graph."""

    nodes: tuple[fx.Node, ...]
    """All nodes in order, including placeholders and output."""
    position: dict[fx.Node, int]
    """Index of each node in that order."""
    pinned: frozenset[fx.Node]
    """Nodes that run exactly once, at their position."""
    units: tuple[fx.Node, ...]
    """The unit calls, in order."""
    writes: dict[fx.Node, tuple[int, ...]]
    """Positions of the writes to each alias set, which is identified by its first node."""
    alias_set: dict[fx.Node, fx.Node]
    """The alias set of each node."""

    def is_tensor(self, node: fx.Node) -> bool:
        """Whether a node's value is a tensor."""
        return isinstance(node.meta.get("val"), torch.Tensor)

    def is_size(self, node: fx.Node) -> bool:
        """Whether a node is a number that the batch size alone determines."""
        return depends_only_on_batch(node.meta.get("val"))

    def written_between(self, node: fx.Node, start: int, stop: int) -> bool:
        """Whether a node's alias set is written after ``start`` and before ``stop``."""
        positions = self.writes.get(self.alias_set[node], ())
        following = bisect_right(positions, start)
        return following < len(positions) and positions[following] < stop

    def needs_gradient(self, model: nn.Module) -> set[fx.Node]:
        """Return the nodes through which a gradient may flow to a parameter that requires one now."""
        differentiable: set[fx.Node] = set()
        parameters = model.named_parameters(remove_duplicate=False)
        trainable = {name for name, parameter in parameters if parameter.requires_grad}
        for node in self.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
                continue
            if any(isinstance(context, GradMode) and not context.enabled for context in node.meta.get("contexts", ())):
                continue
            if node.op == "get_attr":
                has_trainable = str(node.target) in trainable
            elif node.op == "call_module":
                module = model.get_submodule(str(node.target))
                has_trainable = any(parameter.requires_grad for parameter in module.parameters())
            else:
                has_trainable = False
            detaches = node.target in (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)
            if has_trainable or (not detaches and any(source in differentiable for source in node.all_input_nodes)):
                differentiable.add(node)
        return differentiable

    def rebuildable(self, node: fx.Node, boundary: int) -> bool:
        """Whether a node may be recomputed behind a cut before position ``boundary``."""
        if node in self.pinned:
            return False
        if is_view(node):
            return True  # a view of what was sent sees the same writes
        start = self.position[node]
        return not any(self.written_between(value, start, boundary) for value in (node, *node.all_input_nodes))

    def sendable(self, node: fx.Node, boundary: int) -> bool:
        """Whether a value may be sent: a tensor of known shape that no later write changes through another view."""
        if not self.is_tensor(node) or not has_known_shape(node.meta["val"]):
            return False
        written_later = self.written_between(node, boundary - 1, len(self.nodes))
        return not written_later or self.alias_set[node] is node or not is_view(node)


def analyze_glue(graph: fx.Graph, model: nn.Module) -> Glue:
    """Find pinned nodes, alias sets and writes of an assembled graph."""
    nodes = tuple(graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    alias_set: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        source = node.meta.get("alias_of") or _viewed(node)
        alias_set[node] = alias_set[source] if source is not None else node
    writes: dict[fx.Node, list[int]] = {}
    for node in nodes:
        for target in node.meta.get("mutates", ()):
            writes.setdefault(alias_set[target], []).append(position[node])
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    pinned = frozenset(node for node in nodes if _is_pinned(node, parameters, writes))
    return Glue(
        nodes=nodes,
        position=position,
        pinned=pinned,
        units=tuple(node for node in nodes if node.op == "call_module"),
        writes={first: tuple(positions) for first, positions in writes.items()},
        alias_set=alias_set,
    )


def _is_pinned(node: fx.Node, parameters: set[str], writes: dict[fx.Node, Any]) -> bool:
    if node.op in ("placeholder", "call_module", "output") or node.meta.get("mutates"):
        return True
    if node.op == "get_attr":
        return node in writes  # a buffer that glue operations change belongs to one stage only
    if any(source.op == "get_attr" and source.target in parameters for source in node.all_input_nodes):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags or node.target.overloadpacket in flop_registry:
        return True
    name = node.target._schema.name.removeprefix("aten::")
    return any(word in name for word in _RANDOM + _HEAVY)


def _viewed(node: fx.Node) -> fx.Node | None:
    """Return the argument that a node's result is a view of, or that it writes to and returns."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    schema = target._schema
    if schema.name.removeprefix("aten::") in _MAY_ALIAS:
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    returned = {name for result in schema.returns if result.alias_info for name in result.alias_info.before_set}
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and returned & set(argument.alias_info.before_set):
            value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            if isinstance(value, fx.Node):
                return value
    return None


def is_view(node: fx.Node) -> bool:
    """Whether a node is a view of another node's storage and does not write to it."""
    return not node.meta.get("mutates") and node.op == "call_function" and _viewed(node) is not None
