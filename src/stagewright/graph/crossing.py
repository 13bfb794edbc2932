"""What must travel across each cut: the smallest set of tensors from which everything behind it can be computed.

Behind a cut, unit calls need their arguments. An argument may be sent as it is, or rebuilt from something earlier by
cheap glue, which may be smaller: a padding mask of (batch, tokens) instead of the (batch, 1, tokens, tokens) mask made
of it. That choice is a minimum cut in the graph of glue, each value weighing its bytes:

    source ══► pinned value ──bytes──► glue ──bytes──► glue ══► needed behind the cut ══► sink

Values that need no input (position indices, causal masks) hang on no pinned value, so they are never sent. Going from
the last cut to the first, what a later cut sends counts as needed, so a value that skips a stage is passed through it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from torch import fx

from stagewright.errors import CaptureError
from stagewright.graph.glue import Glue
from stagewright.graph.symbols import num_bytes

__all__ = ["crossings"]

_INFINITE = 1 << 62


def crossings(glue: Glue, batch: int) -> list[list[fx.Node]]:
    """For every cut, the nodes whose values travel, in the order in which they are computed."""
    units = glue.units
    ends = [*(glue.position[unit] for unit in units[1:]), len(glue.nodes)]
    found: list[list[fx.Node]] = [[] for _ in units[1:]]
    behind: list[fx.Node] = []
    for cut in range(len(units) - 2, -1, -1):
        boundary = ends[cut]
        segment = [node for node in glue.nodes[boundary : ends[cut + 1]] if node in glue.pinned]
        needed = [source for node in segment for source in node.all_input_nodes] + behind
        behind = _minimum_cut(glue, needed, boundary, batch)
        found[cut] = behind
    return found


def _minimum_cut(glue: Glue, needed: Iterable[fx.Node], boundary: int, batch: int) -> list[fx.Node]:
    """The cheapest values to send so that ``needed`` can be had behind ``boundary``."""
    involved, late = _involved(glue, needed, boundary)
    if not involved:
        return []
    flow = _Flow()
    for node in involved:
        can_send = node not in late and glue.sendable(node, boundary)
        flow.add((node, "in"), (node, "out"), num_bytes(node.meta["val"], batch) if can_send else _INFINITE)
        if glue.rebuildable(node, boundary):
            for source in node.all_input_nodes:
                if source in involved:
                    flow.add((source, "out"), (node, "in"), _INFINITE)
        else:
            flow.add("source", (node, "in"), _INFINITE)
    for node in needed:
        if node in involved:
            flow.add((node, "out"), "sink", _INFINITE)
    reach = flow.sink_side("source", "sink")
    sent = [node for node in involved if (node, "in") not in reach and (node, "out") in reach]
    return sorted(sent, key=glue.position.__getitem__)


def _involved(glue: Glue, needed: Iterable[fx.Node], boundary: int) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes that the needed values can be rebuilt from, those among them that exist only behind the cut, …

    … and none that hang on sizes, constants and attributes alone: these are free everywhere.
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
    bound: set[fx.Node] = set()  # hangs on a pinned value before the cut
    for node in sorted(order, key=glue.position.__getitem__):
        sources = [source for source in node.all_input_nodes if not glue.is_size(source)]
        if not glue.rebuildable(node, boundary):
            bound.add(node)
            continue
        if any(source in bound for source in sources):
            bound.add(node)
        if any(source in late or (source in glue.pinned and glue.position[source] >= boundary) for source in sources):
            late.add(node)
    return bound, late


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
        """After saturating the flow: everything that can still reach the sink, so the cut lies as late as possible."""
        while True:
            path = self._path(source, sink)
            if path is None:
                break
            spare = min(self.capacity[start][end] for start, end in path)
            if spare >= _INFINITE:
                stuck = next(start[0] for start, _ in path[1:] if isinstance(start, tuple))
                raise CaptureError(
                    f"{stuck} is needed on both sides of a cut but can't travel: its shape depends on the data, or "
                    "it is no tensor; keep the code that makes and uses it inside one unit"
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
        before: dict[object, object] = {source: source}
        todo = deque([source])
        while todo:
            node = todo.popleft()
            for end, capacity in self.capacity.get(node, {}).items():
                if capacity > 0 and end not in before:
                    before[end] = node
                    if end == sink:
                        path = []
                        while end != source:
                            path.append((before[end], end))
                            end = before[end]
                        return path[::-1]
                    todo.append(end)
        return None
