"""Crossing tensors: the smallest set of tensors to send across each cut, so that the rest can be computed behind it.

Behind a cut, unit calls need their arguments (the live values). A live value is either sent, or recomputed by cheap
glue operations from an earlier value, which may be smaller: a padding mask of (batch, tokens) instead of the attention
mask of (batch, 1, tokens, tokens) that is derived from it. The choice is a minimum cut in the graph of glue operations,
with the bytes of each value as its capacity:

    source ══► pinned value ──bytes──► glue ──bytes──► glue ══► needed behind the cut ══► sink

Values that depend on no input (position indices, causal masks) depend on no pinned value, so they are never sent. Cuts
are visited from last to first. What a later cut sends is needed here too, so a value that skips a stage passes through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from torch import fx

from stagewright.errors import CaptureError
from stagewright.graph.glue.operations import Glue
from stagewright.graph.symbolic_shapes import num_bytes

_INFINITE = 1 << 62


def find_crossings(glue: Glue, batch: int) -> list[list[fx.Node]]:
    """Return for every cut the nodes whose values are sent, in the order in which they are computed."""
    units = glue.units
    ends = [*(glue.position[unit] for unit in units[1:]), len(glue.nodes)]
    crossings: list[list[fx.Node]] = [[] for _ in units[1:]]
    later: list[fx.Node] = []
    for cut in range(len(units) - 2, -1, -1):
        boundary = ends[cut]
        segment = [node for node in glue.nodes[boundary : ends[cut + 1]] if node in glue.pinned]
        needed = [source for node in segment for source in node.all_input_nodes] + later
        later = crossings[cut] = _minimum_cut(glue, needed, boundary, batch)
    return crossings


def _minimum_cut(glue: Glue, needed: Iterable[fx.Node], boundary: int, batch: int) -> list[fx.Node]:
    """Return the smallest values to send so that ``needed`` can be computed behind ``boundary``."""
    candidates, late = _candidates(glue, needed, boundary)
    if not candidates:
        return []
    flow = _Flow()
    for node in candidates:
        can_send = node not in late and glue.sendable(node, boundary)
        flow.add((node, "in"), (node, "out"), num_bytes(node.meta["val"], batch) if can_send else _INFINITE)
        if glue.rebuildable(node, boundary):
            for source in node.all_input_nodes:
                if source in candidates:
                    flow.add((source, "out"), (node, "in"), _INFINITE)
        else:
            flow.add("source", (node, "in"), _INFINITE)
    for node in needed:
        if node in candidates:
            flow.add((node, "out"), "sink", _INFINITE)
    side = flow.sink_side("source", "sink")
    sent = [node for node in candidates if (node, "in") not in side and (node, "out") in side]
    return sorted(sent, key=glue.position.__getitem__)


def _candidates(glue: Glue, needed: Iterable[fx.Node], boundary: int) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the nodes from which the needed values can be computed, and those that exist only behind the cut.

    Nodes that depend on sizes, constants and attributes alone are excluded: every stage computes these for itself.
    """
    order: list[fx.Node] = []
    seen: set[fx.Node] = set()
    todo = list(needed)
    while todo:
        node = todo.pop()
        if node in seen or glue.is_size(node):
            continue
        seen.add(node)
        if node in glue.pinned and glue.position[node] >= boundary:
            continue  # computed behind the cut anyway
        order.append(node)
        if glue.rebuildable(node, boundary):
            todo.extend(node.all_input_nodes)
    late: set[fx.Node] = set()
    dependent: set[fx.Node] = set()  # depends on a pinned value before the cut
    for node in sorted(order, key=glue.position.__getitem__):
        sources = [source for source in node.all_input_nodes if not glue.is_size(source)]
        if not glue.rebuildable(node, boundary):
            dependent.add(node)
            continue
        if any(source in dependent for source in sources):
            dependent.add(node)
        if any(source in late or (source in glue.pinned and glue.position[source] >= boundary) for source in sources):
            late.add(node)
    return dependent, late


class _Flow:
    """Maximum flow by shortest augmenting paths; the graphs here have tens of nodes."""

    def __init__(self) -> None:
        self.capacity: dict[object, dict[object, int]] = {}

    def add(self, start: object, end: object, capacity: int) -> None:
        """Add an edge and its reverse."""
        forward = self.capacity.setdefault(start, {})
        forward[end] = min(_INFINITE, forward.get(end, 0) + capacity)
        self.capacity.setdefault(end, {}).setdefault(start, 0)

    def sink_side(self, source: object, sink: object) -> set[object]:
        """Saturate the flow and return the vertices that can still reach the sink, which gives the latest cut."""
        while True:
            path = self._path(source, sink)
            if path is None:
                break
            spare = min(self.capacity[start][end] for start, end in path)
            if spare >= _INFINITE:
                stuck = next(start[0] for start, _ in path[1:] if isinstance(start, tuple))
                raise CaptureError(
                    f"{stuck} is needed on both sides of a cut but can't be sent: its shape depends on the data, or "
                    "it is not a tensor; keep the code that makes and uses it inside one unit"
                )
            for start, end in path:
                self.capacity[start][end] -= spare
                self.capacity[end][start] += spare
        side = {sink}
        todo = deque([sink])
        while todo:
            node = todo.popleft()
            for start in self.capacity[node]:
                if start not in side and self.capacity[start][node] > 0:
                    side.add(start)
                    todo.append(start)
        return side

    def _path(self, source: object, sink: object) -> list[tuple[object, object]] | None:
        previous: dict[object, object] = {source: source}
        todo = deque([source])
        while todo:
            node = todo.popleft()
            for end, capacity in self.capacity.get(node, {}).items():
                if capacity > 0 and end not in previous:
                    previous[end] = node
                    if end == sink:
                        path = []
                        while end != source:
                            path.append((previous[end], end))
                            end = previous[end]
                        return path[::-1]
                    todo.append(end)
        return None
