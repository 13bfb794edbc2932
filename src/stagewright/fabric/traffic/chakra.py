"""Import and export of Chakra execution traces: one file per rank, as ASTRA-sim and PyTorch's converters write them.

    PREFIX.0.et    COMP_NODE ─► COMM_COLL_NODE (comm_type, comm_size, pg_name), COMM_SEND_NODE, COMM_RECV_NODE

Import matches the k-th collective of a group across the ranks' files. Identical messages are measured once and counted;
computation between two messages becomes the gap before the second. If all collectives span all ranks, the trace can be
rescaled to another number of ranks: gradient sizes do not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from stagewright.errors import UsageError
from stagewright.fabric.collectives.algorithms import ALL_REDUCE
from stagewright.fabric.traffic.workload import Message, Workload
from stagewright.files.chakra import Collective, Node, NodeType, Value, find_ranks, read_nodes, write_ranks

# Chakra's name of a collective → ours; the algorithm of an all-reduce is chosen by the user.
_KINDS = {
    "ALL_REDUCE": "ring",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "REDUCE_SCATTER_BLOCK": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "BROADCAST": "broadcast",
}
_NAMES = {
    "all-gather": "ALL_GATHER",
    "reduce-scatter": "REDUCE_SCATTER",
    "all-to-all": "ALL_TO_ALL",
    "broadcast": "BROADCAST",
    **dict.fromkeys(ALL_REDUCE, "ALL_REDUCE"),
}


def from_chakra(
    prefix: str | Path, *, num_ranks: int | None = None, algorithm: str = "ring", trials: int, **more: Any
) -> Workload:
    """Read the messages of a trace; rescale them to ``num_ranks`` if the trace allows it."""
    files = find_ranks(Path(prefix))
    messages: dict[tuple[Any, ...], Message] = {}
    order: dict[tuple[str, int], tuple[Any, ...]] = {}
    members: dict[tuple[Any, ...], set[int]] = {}
    for rank, path in enumerate(files):
        seen: dict[str, int] = {}
        gap_s = 0.0
        for node in read_nodes(path):
            if node.type == NodeType.COMP_NODE:
                gap_s += node.duration_us / 1e6
                continue
            parsed = _message(node, rank, len(files), algorithm, path)
            if parsed is None:
                continue
            group, key, message = parsed
            number = seen[group] = seen.get(group, -1) + 1
            first = order.setdefault((group, number), (group, number, *key))
            if first[2:] != key:
                raise UsageError(
                    f"{path}: message {number} of group {group!r} is {key}, but another rank's file has {first[2:]}"
                )
            members.setdefault(first, set()).update(message.groups[0] if message.groups else {rank})
            before = messages.get(first)
            longest_s = gap_s if before is None else max(gap_s, before.gap_s)
            messages[first] = replace(message, gap_s=longest_s)
            gap_s = 0.0
    if not messages:
        raise UsageError(f"the trace {prefix} contains no communication")
    # A collective's ranks are those whose files contain it.
    grouped = [
        replace(message, groups=message.groups or (tuple(sorted(members[key])),)) for key, message in messages.items()
    ]
    workload = Workload(
        name=Path(prefix).name, num_ranks=len(files), messages=tuple(_count(grouped)), trials=trials, **more
    )
    return workload if num_ranks in (None, len(files)) else _rescale(workload, int(num_ranks or 0))


def to_chakra(workload: Workload, prefix: str | Path) -> list[Path]:
    """Write a workload as one file per rank, each atomically."""
    return write_ranks(prefix, workload.num_ranks, lambda rank: _nodes(workload, rank))


def _message(
    node: Node, rank: int, num_ranks: int, algorithm: str, path: Path
) -> tuple[str, tuple[Any, ...], Message] | None:
    """Return (group that counts it, values that all its ranks must agree on, message)."""
    if node.type in (NodeType.COMM_SEND_NODE, NodeType.COMM_RECV_NODE):
        source, target = _integer(node, "comm_src", -1, path), _integer(node, "comm_dst", -1, path)
        if not (0 <= source < num_ranks and 0 <= target < num_ranks) or source == target:
            raise UsageError(f"{path}: node {node.id} sends from rank {source} to {target} of {num_ranks}")
        size = _integer(node, "comm_size", 0, path)
        message = Message(name=f"{source} → {target}", algorithm="pipeline", num_bytes=size, groups=((source, target),))
        return f"{source} to {target}", ("pipeline", size), message
    if node.type != NodeType.COMM_COLL_NODE:
        return None
    number = _integer(node, "comm_type", 0, path)
    kind = Collective(number).name if number in set(Collective) else f"collective of type {number}"
    if kind == "BARRIER":
        return None
    if kind not in _KINDS:
        raise UsageError(
            f"{path}: node {node.id} is a {kind}, which fabric cannot send; supported: {', '.join(_KINDS)}"
        )
    size = _integer(node, "comm_size", 0, path)
    chosen = algorithm if kind == "ALL_REDUCE" else _KINDS[kind]
    message = Message(name=str(node.name), algorithm=chosen, num_bytes=size, groups=())
    return str(node.attributes.get("pg_name", "all")), (chosen, size), message


def _count(messages: list[Message]) -> list[Message]:
    """Merge identical messages and count them."""
    merged: dict[tuple[Any, ...], Message] = {}
    for message in messages:
        key = (message.algorithm, message.num_bytes, message.groups)
        before = merged.get(key)
        merged[key] = message if before is None else replace(before, count=before.count + 1)
    return list(merged.values())


def _rescale(workload: Workload, num_ranks: int) -> Workload:
    all_ranks = tuple(range(workload.num_ranks))
    for message in workload.messages:
        if message.groups != (all_ranks,):
            raise UsageError(
                f"the trace of {workload.num_ranks} ranks cannot be rescaled to {num_ranks}: {message.name!r} is "
                f"between the ranks {message.groups}; only messages between all ranks can be rescaled"
            )
    groups = (tuple(range(num_ranks)),)
    messages = tuple(replace(message, groups=groups) for message in workload.messages)
    return replace(workload, num_ranks=num_ranks, messages=messages, delays_s=())


def _nodes(workload: Workload, rank: int) -> Iterator[Node]:
    """Yield the nodes of one rank, each depending on the previous; overlapped messages depend only on computation."""
    number = 0
    computed: list[int] = []
    sent: list[int] = []
    for message in workload.messages:
        group = next((group for group in message.groups if rank in group), None)
        for _ in range(message.count):
            if message.gap_s:
                yield Node(
                    id=number,
                    name=f"before {message.name}",
                    type=NodeType.COMP_NODE,
                    duration_us=round(message.gap_s * 1e6),
                    data_dependencies=list(computed if workload.overlap else [*computed, *sent]),
                )
                computed, number = [number], number + 1
            if group is None:
                continue
            for node in _communication(message, group, rank):
                node.id = number
                node.data_dependencies = list(computed if workload.overlap else sorted({*computed, *sent}))
                yield node
                sent, number = [number], number + 1


def _communication(message: Message, group: tuple[int, ...], rank: int) -> Iterator[Node]:
    position = group.index(rank)
    common = {"is_cpu_op": False, "comm_size": message.num_bytes}
    if message.algorithm != "pipeline":
        kind = int(Collective[_NAMES[message.algorithm]])
        attributes: dict[str, Value] = {**common, "comm_type": kind, "pg_name": "-".join(map(str, group))}
        yield Node(name=message.name, type=NodeType.COMM_COLL_NODE, attributes=attributes)
        return
    for node_type, source, target in (
        (NodeType.COMM_RECV_NODE, position - 1, position),
        (NodeType.COMM_SEND_NODE, position, position + 1),
    ):
        if source >= 0 and target < len(group):
            ends = {"comm_src": group[source], "comm_dst": group[target]}
            yield Node(name=message.name, type=node_type, attributes={**common, **ends})


def _integer(node: Node, name: str, default: int, path: Path) -> int:
    """Return a whole number among a node's attributes."""
    value = node.attributes.get(name, default)
    if isinstance(value, str | bool) or value != value or abs(value) == float("inf"):
        raise UsageError(f"{path}: {name} of node {node.id} is {value!r}, not a whole number")
    return int(value)
