"""Segments of glue operations that can be run alone; each counts for the unit in whose stage it runs.

    unit 0 ─► max_pool ─► unit 1        a cut there sends the crossing tensors: operations needed to compute them run
             └─ sent ─┘                 in the stage before the cut, all others in the stage behind it

So operations whose results are sent, or that are pinned, count for the unit before them, all others for the next unit.
Operations that later stages recompute for themselves (masks, positions) count where they run first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import fx, nn

from stagewright.graph.glue.operations import Glue, is_view


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGlue:
    """Glue operations between two units, with their recorded inputs."""

    unit: int
    """Index of the unit call that they count for."""
    is_after: bool
    """Whether they run after that unit, not before it."""
    module: nn.Module
    """The operations as a module."""
    args: tuple[Any, ...]
    """The recorded inputs of the module."""


class _Segment(nn.Module):
    """Operations that run in the same contexts."""

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


def record_glue(
    glue: Glue,
    model: nn.Module,
    constants: dict[str, Any],
    crossings: Sequence[Sequence[fx.Node]],
    inputs: Iterable[Any],
) -> Iterator[RecordedGlue]:
    """Run the graph node by node; yield the segments between two units after they have run.

    Segments that only compute sizes and views are skipped, and so are those whose operations run in several contexts.
    """
    env: dict[fx.Node, Any] = {}
    input_values = iter(inputs)
    bounds = [-1, *(glue.position[unit] for unit in glue.units), len(glue.nodes)]
    for index in range(len(glue.units) + 1):
        between = glue.nodes[bounds[index] + 1 : bounds[index + 1]]
        operations = [node for node in between if node.op == "call_function" and not glue.is_size(node)]
        early = _needed_before_cut(glue, operations, crossings[index - 1]) if 0 < index < len(glue.units) else set()
        segments = [
            (index - 1, [node for node in operations if node in early]),
            (min(index, len(glue.units) - 1), [node for node in operations if node not in early]),
        ]
        built = [(unit, _build(nodes)) for unit, nodes in segments if any(not is_view(node) for node in nodes)]
        for node in between:
            if node.op == "placeholder":
                env[node] = next(input_values)
            elif node.op == "get_attr":
                name = str(node.target)
                env[node] = constants[name] if name in constants else reduce(getattr, name.split("."), model)
            elif node.op == "call_function":
                env[node] = _run(node, node.target, env)
        for unit, segment in built:
            if segment is not None:
                module, sources = segment
                args = tuple(env[source] for source in sources)
                yield RecordedGlue(unit=unit, is_after=unit < index, module=module, args=args)
        if index < len(glue.units):
            node = glue.units[index]
            env[node] = _run(node, model.get_submodule(str(node.target)), env)


def _run(node: fx.Node, target: Any, env: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg(node.args, env.__getitem__), fx.map_arg(node.kwargs, env.__getitem__)
    with ExitStack() as stack:
        for context in node.meta.get("contexts", ()):
            stack.enter_context(context.open())
        return target(*args, **kwargs)


def _needed_before_cut(glue: Glue, nodes: Sequence[fx.Node], crossing: Sequence[fx.Node]) -> set[fx.Node]:
    """Return those of the nodes between two units that the stage before the cut computes."""
    inside = set(nodes)
    early: set[fx.Node] = set()
    todo = [node for node in nodes if node in glue.pinned or node in crossing]
    while todo:
        node = todo.pop()
        if node in inside and node not in early:
            early.add(node)
            todo.extend(node.all_input_nodes)
    return early


def _build(nodes: Sequence[fx.Node]) -> tuple[_Segment, list[fx.Node]] | None:
    """Build a module from the nodes; return it with the nodes that are its inputs."""
    contexts = {tuple(node.meta.get("contexts", ())) for node in nodes}
    if len(contexts) > 1:
        return None
    inside = set(nodes)
    sources = list(dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside))
    graph = fx.Graph()
    new = {source: graph.placeholder(f"value_{index}") for index, source in enumerate(sources)}
    for node in nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    results = [node for node in nodes if not node.users or any(user not in inside for user in node.users)]
    graph.output(tuple(new[node] for node in results))
    return _Segment(graph, next(iter(contexts))), sources
