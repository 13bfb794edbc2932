"""What a model does between its units, in pieces that can be run alone: each goes with the unit in whose stage it runs.

    unit 0 ─► max_pool ─► unit 1        a cut there sends what crosses it: whatever must be done to send it is done by
             └─ sent ─┘                 the stage before, all else by the one behind; without a cut it is all the same

So a piece behind a unit (its results are sent, or it must run at its place) goes with that unit, any other with the one
that comes next. What later stages build again for themselves, masks and positions, counts where it is first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import fx, nn

from stagewright.graph.glue import Glue, is_view

__all__ = ["RecordedPiece", "record_pieces"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPiece:
    """Operations between two units, with the real values that they got."""

    unit: int
    """The unit call that they go with."""
    module: nn.Module
    """Them, as a module."""
    args: tuple[Any, ...]
    """What it takes."""


class _Piece(nn.Module):
    """Operations that all ran in the same contexts."""

    def __init__(self, graph: fx.Graph, contexts: Sequence[Any]) -> None:
        super().__init__()
        self._run = fx.GraphModule(nn.Module(), graph)
        self._contexts = tuple(contexts)

    def forward(self, *values: Any) -> Any:
        if not self._contexts:
            return self._run(*values)
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context.open())
            return self._run(*values)


def record_pieces(
    glue: Glue,
    model: nn.Module,
    constants: dict[str, Any],
    crossings: Sequence[Sequence[fx.Node]],
    inputs: Iterable[Any],
) -> Iterator[RecordedPiece]:
    """Run the graph step by step; yield the pieces between two units when they have run.

    Pieces without work of their own (sizes, views) are left out, and those whose operations ran in several contexts.
    """
    env: dict[fx.Node, Any] = {}
    given = iter(inputs)
    bounds = [-1, *(glue.position[unit] for unit in glue.units), len(glue.nodes)]
    for at in range(len(glue.units) + 1):
        between = glue.nodes[bounds[at] + 1 : bounds[at + 1]]
        found = [node for node in between if node.op == "call_function" and not glue.is_size(node)]
        behind = _behind(glue, found, crossings[at - 1]) if 0 < at < len(glue.units) else set()
        pieces = [
            (at - 1, [node for node in found if node in behind]),
            (min(at, len(glue.units) - 1), [node for node in found if node not in behind]),
        ]
        built = [(unit, _build(nodes)) for unit, nodes in pieces if any(not is_view(node) for node in nodes)]
        for node in between:
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op == "get_attr":
                name = str(node.target)
                env[node] = constants[name] if name in constants else reduce(getattr, name.split("."), model)
            elif node.op == "call_function":
                env[node] = _run(node, node.target, env)
        for unit, made in built:
            if made is not None:
                yield RecordedPiece(unit=unit, module=made[0], args=tuple(env[source] for source in made[1]))
        if at < len(glue.units):
            node = glue.units[at]
            env[node] = _run(node, model.get_submodule(str(node.target)), env)


def _run(node: fx.Node, target: Any, env: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg(node.args, env.__getitem__), fx.map_arg(node.kwargs, env.__getitem__)
    with ExitStack() as stack:
        for context in node.meta.get("contexts", ()):
            stack.enter_context(context.open())
        return target(*args, **kwargs)


def _behind(glue: Glue, nodes: Sequence[fx.Node], crossing: Sequence[fx.Node]) -> set[fx.Node]:
    """Of the nodes between two units, those that a stage which ends there computes."""
    inside = set(nodes)
    found: set[fx.Node] = set()
    todo = [node for node in nodes if node in glue.pinned or node in crossing]
    while todo:
        node = todo.pop()
        if node in inside and node not in found:
            found.add(node)
            todo.extend(node.all_input_nodes)
    return found


def _build(nodes: Sequence[fx.Node]) -> tuple[_Piece, list[fx.Node]] | None:
    """The nodes as a module, and what it takes."""
    contexts = {tuple(node.meta.get("contexts", ())) for node in nodes}
    if len(contexts) > 1:
        return None
    inside = set(nodes)
    taken = list(dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside))
    graph = fx.Graph()
    new = {source: graph.placeholder(f"value_{at}") for at, source in enumerate(taken)}
    for node in nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    used = [node for node in nodes if not node.users or any(user not in inside for user in node.users)]
    graph.output(tuple(new[node] for node in used))
    return _Piece(graph, next(iter(contexts))), taken
