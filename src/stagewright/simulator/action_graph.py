"""The dependency graph of a pipeline's actions and P2P transfers, as arrays sorted by level.

    worker 0   F0 ─► F1 ──────────► B0 ─► B1         nodes: actions, and P2P transfers between workers
                │╲    ╲            ╱     ╱           edges: a worker's actions in order; an action to its transfer;
    worker 1     ╲ F0 ─► B0 ─► F1 ─► B1                     a transfer to the action that needs it

The actions are those the engine executes (`schedules.actions`). A transfer also waits for the previous one on its edge
and for its posted receive: a worker posts `AHEAD` receives per peer and direction, and the next one when it consumes
one. Since the order is fixed, start times are a longest path: level by level, the latest end of a node's predecessors.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stagewright.schedules.action_order import Action, Actions, Kind, forward_actions, schedule_actions

Integers: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

# As in the engine: receives posted ahead, and bytes of a stream in flight.
AHEAD = 2
IN_FLIGHT_BYTES = 8 << 20
KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_CODES = {kind: code for code, kind in enumerate(KINDS)}
FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = range(4)
_MAX_PREDECESSORS = 3  # predecessors whose end a node waits for


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActionGraph:
    """Nodes in topological order; the nodes of one level are contiguous."""

    num_workers: int
    num_stages: int
    num_microbatches: int
    is_p2p: npt.NDArray[np.bool_]
    """Whether a node is a P2P transfer; otherwise it is an action."""
    worker: Integers
    """An action's worker, or a transfer's sender."""
    receiver: Integers
    """A transfer's receiver, or the action's worker."""
    stage: Integers
    """An action's stage, or the stage that produced a transfer's activation or gradient."""
    kind: Integers
    """An action's kind, by its index in KINDS, or a transfer's direction: FORWARD or BACKWARD."""
    microbatch: Integers
    after_end: Integers
    """Nodes whose end each node waits for; the number of nodes means none."""
    after_start: Integers
    """Action whose start posts a transfer's receive; the number of nodes means none."""
    bounds: Integers
    """The first node of each level, and the number of nodes."""

    @property
    def num_nodes(self) -> int:
        return len(self.worker)

    def times(self, duration_s: Floats) -> tuple[Floats, Floats]:
        """Compute the start and end of every node; durations are [nodes] or [nodes, candidates]."""
        assert len(duration_s) == self.num_nodes
        shape = (self.num_nodes + 1, *duration_s.shape[1:])
        start, end = np.zeros(shape), np.zeros(shape)
        bounds = self.bounds.tolist()
        for low, high in itertools.pairwise(bounds):
            first, second, third = self.after_end[low:high].T
            begin = np.maximum(end[first], end[second])
            np.maximum(begin, end[third], out=begin)
            np.maximum(begin, start[self.after_start[low:high]], out=begin)
            start[low:high] = begin
            end[low:high] = begin + duration_s[low:high]
        return start[:-1], end[:-1]


@lru_cache(maxsize=128)
def training_graph(
    schedule: str, stage_workers: tuple[int, ...], num_microbatches: int, searched: tuple[str, ...] = ()
) -> ActionGraph:
    """Build the graph of a training step; ``searched``: the order of the schedule of that name."""
    actions = schedule_actions(schedule, stage_workers, num_microbatches, searched=searched)
    return build_graph(actions, stage_workers)


@lru_cache(maxsize=32)
def inference_graph(stage_workers: tuple[int, ...], num_microbatches: int) -> ActionGraph:
    """Build the graph of inference as one stream."""
    return build_graph(forward_actions(stage_workers, num_microbatches), stage_workers)


@dataclass(slots=True)
class _Node:
    worker: int
    receiver: int
    stage: int
    kind: int
    microbatch: int
    before: list[int]  # nodes whose end it waits for
    posted_by: int = -1  # node whose start it waits for
    is_p2p: bool = False


_Key: TypeAlias = tuple[int, bool, int]  # producing stage, whether backward, micro-batch


def build_graph(actions: Actions, stage_workers: Sequence[int], ahead: int = AHEAD) -> ActionGraph:
    """Build the graph of every worker's actions and their transfers."""
    nodes: list[_Node] = []
    numbers: dict[Action, int] = {}
    for worker, worker_actions in enumerate(actions):
        previous = -1
        for action in worker_actions:
            numbers[action] = previous = _add(nodes, action, worker, previous)
    transfers = _add_transfers(nodes, actions, numbers, stage_workers)
    _post_receives(nodes, actions, numbers, transfers, stage_workers, ahead)
    for action, number in numbers.items():
        key = _received_by(action, stage_workers)
        if key is not None and key in transfers:
            nodes[number].before.append(transfers[key])
    return _sort_by_level(nodes, len(actions), stage_workers)


def _add(nodes: list[_Node], action: Action, worker: int, previous: int) -> int:
    before = [previous] if previous >= 0 else []
    nodes.append(_Node(worker, worker, action.stage, _CODES[action.kind], action.microbatch, before))
    return len(nodes) - 1


def _sent_by(action: Action, stage_workers: Sequence[int]) -> tuple[_Key, int] | None:
    """Return the transfer that an action starts, and its receiver; None if the value stays on its worker."""
    if action.kind is Kind.FORWARD and action.stage + 1 < len(stage_workers):
        key, receiver = (action.stage, False, action.microbatch), stage_workers[action.stage + 1]
    elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and action.stage > 0:
        key, receiver = (action.stage, True, action.microbatch), stage_workers[action.stage - 1]
    else:
        return None
    return None if receiver == stage_workers[action.stage] else (key, receiver)


def _received_by(action: Action, stage_workers: Sequence[int]) -> _Key | None:
    """Return the transfer that an action needs."""
    if action.kind is Kind.FORWARD:
        return (action.stage - 1, False, action.microbatch) if action.stage > 0 else None
    if action.kind is Kind.BACKWARD_WEIGHT or action.stage + 1 == len(stage_workers):
        return None
    return action.stage + 1, True, action.microbatch


def _add_transfers(
    nodes: list[_Node], actions: Actions, numbers: dict[Action, int], stage_workers: Sequence[int]
) -> dict[_Key, int]:
    """Add a node for each transfer, after its producing action and the previous transfer on its edge."""
    transfers: dict[_Key, int] = {}
    latest: dict[tuple[int, int, bool], int] = {}
    for worker, worker_actions in enumerate(actions):
        for action in worker_actions:
            sent = _sent_by(action, stage_workers)
            if sent is None:
                continue
            key, receiver = sent
            edge = worker, receiver, key[1]
            before = [numbers[action], *([latest[edge]] if edge in latest else [])]
            kind = BACKWARD if key[1] else FORWARD
            nodes.append(_Node(worker, receiver, key[0], kind, key[2], before, is_p2p=True))
            transfers[key] = latest[edge] = len(nodes) - 1
    return transfers


def _post_receives(
    nodes: list[_Node],
    actions: Actions,
    numbers: dict[Action, int],
    transfers: dict[_Key, int],
    stage_workers: Sequence[int],
    ahead: int,
) -> None:
    """Set which action posts each transfer's receive, as the engine does.

    `ahead` receives are posted at the start of the step, then one for each that is consumed, and more if an action
    needs a later one.
    """
    waiting: dict[tuple[int, int, bool], list[_Key]] = {}
    for worker, worker_actions in enumerate(actions):
        for action in worker_actions:
            sent = _sent_by(action, stage_workers)
            if sent is not None:
                key, receiver = sent
                waiting.setdefault((worker, receiver, key[1]), []).append(key)
    position = dict.fromkeys(waiting, 0)
    posted: dict[tuple[int, int, bool], set[_Key]] = {edge: set() for edge in waiting}

    def post(edge: tuple[int, int, bool], limit: int, on_start_of: int, after_end_of: int) -> None:
        while len(posted[edge]) < limit and position[edge] < len(waiting[edge]):
            key = waiting[edge][position[edge]]
            position[edge] += 1
            posted[edge].add(key)
            if on_start_of >= 0:
                nodes[transfers[key]].posted_by = on_start_of
            elif after_end_of >= 0:
                nodes[transfers[key]].before.append(after_end_of)

    for edge in waiting:
        post(edge, ahead, -1, -1)
    for worker, worker_actions in enumerate(actions):
        previous = -1
        for action in worker_actions:
            needed = _received_by(action, stage_workers)
            if needed is not None and needed in transfers:
                edge = stage_workers[needed[0]], worker, needed[1]
                while needed not in posted[edge]:
                    post(edge, len(posted[edge]) + 1, -1, previous)
                posted[edge].discard(needed)
                post(edge, ahead, numbers[action], -1)
            previous = numbers[action]


def _sort_by_level(nodes: list[_Node], num_workers: int, stage_workers: Sequence[int]) -> ActionGraph:
    """Sort the nodes by level, which is one more than the highest level among their predecessors."""
    level = [-1] * len(nodes)
    successors: list[list[int]] = [[] for _ in nodes]
    num_pending = [0] * len(nodes)
    for number, node in enumerate(nodes):
        assert len(node.before) <= _MAX_PREDECESSORS
        for predecessor in (*node.before, node.posted_by):
            if predecessor >= 0:
                successors[predecessor].append(number)
                num_pending[number] += 1
    ready = [number for number, count in enumerate(num_pending) if not count]
    current = 0
    while ready:
        next_ready: list[int] = []
        for number in ready:
            level[number] = current
            for successor in successors[number]:
                num_pending[successor] -= 1
                if not num_pending[successor]:
                    next_ready.append(successor)
        ready, current = next_ready, current + 1
    assert min(level, default=0) >= 0, "the actions depend on each other in a cycle"
    order = np.argsort(np.array(level), kind="stable")
    position = np.empty(len(nodes) + 1, dtype=np.int64)
    position[order] = np.arange(len(nodes))
    position[-1] = len(nodes)  # index -1 means none
    ordered = [nodes[number] for number in order]
    none = [-1] * _MAX_PREDECESSORS
    before = np.array([(node.before + none)[:_MAX_PREDECESSORS] for node in ordered], dtype=np.int64)
    return ActionGraph(
        num_workers=num_workers,
        num_stages=len(stage_workers),
        num_microbatches=1 + max(node.microbatch for node in nodes),
        is_p2p=np.array([node.is_p2p for node in ordered]),
        worker=np.array([node.worker for node in ordered]),
        receiver=np.array([node.receiver for node in ordered]),
        stage=np.array([node.stage for node in ordered]),
        kind=np.array([node.kind for node in ordered]),
        microbatch=np.array([node.microbatch for node in ordered]),
        after_end=position[before.reshape(-1, _MAX_PREDECESSORS)],
        after_start=position[np.array([node.posted_by for node in ordered], dtype=np.int64)],
        bounds=np.searchsorted(np.array(level)[order], np.arange(current + 1)),
    )
