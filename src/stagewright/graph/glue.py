"""What may be done with the nodes between units: which are computed once, which wherever they are needed.

A node is *pinned* when it must run exactly once, at its place: unit calls, random numbers, anything that writes to a
tensor, heavy arithmetic, and whatever reads a parameter (so that no parameter is held twice). Everything else is cheap
and pure: it is rebuilt in each stage that needs it.

Writes are tracked by *alias set* (a tensor and its views). A read that happens before a write to its set must not be
rebuilt after that write.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils.flop_counter import flop_registry

from stagewright.graph.contexts import GradMode
from stagewright.graph.symbols import follows_from_batch, has_known_shape

__all__ = ["Glue", "analyse", "is_view"]

_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal", "poisson", "exponential", "rrelu", "uniform")
_HEAVY = ("matmul", "linear", "einsum", "conv", "attention", "lstm", "gru", "rnn", "fft", "bilinear", "tensordot")
_MAY_ALIAS = ("dropout", "alpha_dropout", "feature_dropout")  # return their input unless training


@dataclass(frozen=True, slots=True, kw_only=True)
class Glue:
    """The analysed graph."""

    nodes: tuple[fx.Node, ...]
    """All nodes in order, placeholders and output too."""
    position: dict[fx.Node, int]
    """Place of each node in that order."""
    pinned: frozenset[fx.Node]
    """Nodes that run exactly once, at their place."""
    units: tuple[fx.Node, ...]
    """The unit calls, in order."""
    writes: dict[fx.Node, tuple[int, ...]]
    """Per alias set (named by its first node): positions at which something writes to it."""
    alias_set: dict[fx.Node, fx.Node]
    """The alias set of each node."""

    def is_tensor(self, node: fx.Node) -> bool:
        """Whether a node's value is one tensor."""
        return isinstance(node.meta.get("val"), torch.Tensor)

    def is_size(self, node: fx.Node) -> bool:
        """Whether a node is a number that follows from the batch size alone."""
        return follows_from_batch(node.meta.get("val"))

    def written_between(self, node: fx.Node, start: int, stop: int) -> bool:
        """Whether a node's alias set is written to after ``start`` and before ``stop``."""
        times = self.writes.get(self.alias_set[node], ())
        return bisect_right(times, start) < len(times) and times[bisect_right(times, start)] < stop

    def needs_gradient(self, model: nn.Module) -> set[fx.Node]:
        """Nodes through which a gradient may flow to a parameter, as the parameters' ``requires_grad`` stands now."""
        found: set[fx.Node] = set()
        every = model.named_parameters(remove_duplicate=False)
        trainable = {name for name, parameter in every if parameter.requires_grad}
        for node in self.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
                continue
            if any(isinstance(context, GradMode) and not context.enabled for context in node.meta.get("contexts", ())):
                continue
            if node.op == "get_attr":
                own = str(node.target) in trainable
            elif node.op == "call_module":
                own = any(one.requires_grad for one in model.get_submodule(str(node.target)).parameters())
            else:
                own = False
            detaches = node.target in (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)
            if own or (not detaches and any(source in found for source in node.all_input_nodes)):
                found.add(node)
        return found

    def rebuildable(self, node: fx.Node, boundary: int) -> bool:
        """Whether a node may be computed again behind a cut that lies before position ``boundary``."""
        if node in self.pinned:
            return False
        if is_view(node):
            return True  # a view of what was sent sees the same writes
        at = self.position[node]
        return not any(self.written_between(source, at, boundary) for source in node.all_input_nodes)

    def sendable(self, node: fx.Node, boundary: int) -> bool:
        """Whether a value may travel: a tensor of known shape that no later write reaches through another view."""
        if not self.is_tensor(node) or not has_known_shape(node.meta["val"]):
            return False
        later = self.written_between(node, boundary - 1, len(self.nodes))
        return not later or self.alias_set[node] is node or not is_view(node)


def analyse(graph: fx.Graph, model: nn.Module) -> Glue:
    """Sort the nodes of an assembled graph."""
    nodes = tuple(graph.nodes)
    position = {node: at for at, node in enumerate(nodes)}
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
        writes={first: tuple(times) for first, times in writes.items()},
        alias_set=alias_set,
    )


def _is_pinned(node: fx.Node, parameters: set[str], writes: dict[fx.Node, Any]) -> bool:
    if node.op in ("placeholder", "call_module", "output") or node.meta.get("mutates"):
        return True
    if node.op == "get_attr":
        return node in writes  # a buffer that the glue itself changes lives in one stage only
    if any(source.op == "get_attr" and source.target in parameters for source in node.all_input_nodes):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags or node.target.overloadpacket in flop_registry:
        return True
    name = node.target._schema.name.removeprefix("aten::")
    return any(word in name for word in _RANDOM + _HEAVY)


def _viewed(node: fx.Node) -> fx.Node | None:
    """The argument that a node's result is a view of, or writes to and returns."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    schema = target._schema
    if schema.name.removeprefix("aten::") in _MAY_ALIAS:
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    returned = {name for result in schema.returns if result.alias_info for name in result.alias_info.before_set}
    for at, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and returned & set(argument.alias_info.before_set):
            value = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
            if isinstance(value, fx.Node):
                return value
    return None


def is_view(node: fx.Node) -> bool:
    """Whether a node only looks at another one's storage, without writing."""
    return not node.meta.get("mutates") and node.op == "call_function" and _viewed(node) is not None
