"""A pipeline's actions resolved to a fixed order: who must end before whom, as arrays, in levels.

    worker 0   F0 ─► F1 ──────────► B0 ─► B1         nodes: the actions, and the messages between workers
                │╲    ╲            ╱     ╱           edges: a worker's actions in turn; an action to its message;
    worker 1     ╲ F0 ─► B0 ─► F1 ─► B1                     a message to the action that needs it

The actions are those that the engine executes (`plan.actions`). A message also waits for the one before it on its edge
and for its receive: a worker posts `AHEAD` receives for each peer and direction, the next when it takes one. Because
the order is fixed, times are a longest path: level by level, the latest of a node's predecessors, then its duration.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stagewright.schedules.actions import Action, Actions, Kind, forward_actions, schedule_actions

__all__ = [
    "AHEAD",
    "IN_FLIGHT_BYTES",
    "KINDS",
    "Floats",
    "Integers",
    "ActionGraph",
    "inference_graph",
    "build_graph",
    "training_graph",
]

Integers: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

# As the engine's (`engine.transport`): receives posted before they are needed, bytes of a stream on their way.
AHEAD = 2
IN_FLIGHT_BYTES = 8 << 20
KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_CODES = {kind: code for code, kind in enumerate(KINDS)}
FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = range(4)
_NUM_BEFORE = 3  # edges into a node that wait for an end


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActionGraph:
    """Nodes in an order in which none comes before what it waits for; nodes of one level are side by side."""

    num_workers: int
    """Workers of the pipeline."""
    num_stages: int
    """Stages of the pipeline."""
    num_microbatches: int
    """Micro-batches of a step."""
    is_p2p: npt.NDArray[np.bool_]
    """Whether a node is a message; otherwise it is an action."""
    worker: Integers
    """An action's worker, a message's sender."""
    receiver: Integers
    """A message's receiver; an action's own worker."""
    stage: Integers
    """An action's stage; the stage whose result a message carries (forward) or whose gradient (backward)."""
    kind: Integers
    """An action's kind, by its place in KINDS; of a message FORWARD or BACKWARD, its direction."""
    microbatch: Integers
    """The micro-batch."""
    after_end: Integers
    """Nodes whose end each node waits for; the number of nodes stands for none."""
    after_start: Integers
    """The action whose start (its inputs are there) posts a message's receive; the number of nodes stands for none."""
    bounds: Integers
    """The first node of every level, and the number of nodes."""

    @property
    def num_nodes(self) -> int:
        """Actions and messages."""
        return len(self.worker)

    def times(self, duration_s: Floats) -> tuple[Floats, Floats]:
        """Start and end of every node; durations are [nodes] or [nodes, candidates]."""
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
def training_graph(schedule: str, stage_workers: tuple[int, ...], num_microbatches: int) -> ActionGraph:
    """The order of a training step."""
    return build_graph(schedule_actions(schedule, stage_workers, num_microbatches), stage_workers)


@lru_cache(maxsize=32)
def inference_graph(stage_workers: tuple[int, ...], num_microbatches: int) -> ActionGraph:
    """The order of inference, as one stream."""
    return build_graph(forward_actions(stage_workers, num_microbatches), stage_workers)


@dataclass(slots=True)
class _Node:
    worker: int
    receiver: int
    stage: int
    kind: int
    microbatch: int
    before: list[int]  # whose end it waits for
    posted_by: int = -1  # whose start it waits for
    is_p2p: bool = False


_Key: TypeAlias = tuple[int, bool, int]  # stage that makes it, backward, micro-batch


def build_graph(actions: Actions, stage_workers: Sequence[int], ahead: int = AHEAD) -> ActionGraph:
    """The actions of every worker as nodes, with their messages."""
    nodes: list[_Node] = []
    numbers: dict[Action, int] = {}
    for worker, own in enumerate(actions):
        previous = -1
        for action in own:
            numbers[action] = previous = _add(nodes, action, worker, previous)
    messages = _messages(nodes, actions, numbers, stage_workers)
    _post(nodes, actions, numbers, messages, stage_workers, ahead)
    for action, number in numbers.items():
        key = _needs(action, stage_workers)
        if key is not None and key in messages:
            nodes[number].before.append(messages[key])
    return _in_levels(nodes, len(actions), stage_workers)


def _add(nodes: list[_Node], action: Action, worker: int, previous: int) -> int:
    before = [previous] if previous >= 0 else []
    nodes.append(_Node(worker, worker, action.stage, _CODES[action.kind], action.microbatch, before))
    return len(nodes) - 1


def _gives(action: Action, stage_workers: Sequence[int]) -> tuple[_Key, int] | None:
    """The message that an action makes, and its receiver; None where the value stays on its worker."""
    if action.kind is Kind.FORWARD and action.stage + 1 < len(stage_workers):
        key, receiver = (action.stage, False, action.microbatch), stage_workers[action.stage + 1]
    elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and action.stage > 0:
        key, receiver = (action.stage, True, action.microbatch), stage_workers[action.stage - 1]
    else:
        return None
    return None if receiver == stage_workers[action.stage] else (key, receiver)


def _needs(action: Action, stage_workers: Sequence[int]) -> _Key | None:
    """The message that an action takes."""
    if action.kind is Kind.FORWARD:
        return (action.stage - 1, False, action.microbatch) if action.stage > 0 else None
    if action.kind is Kind.BACKWARD_WEIGHT or action.stage + 1 == len(stage_workers):
        return None
    return action.stage + 1, True, action.microbatch


def _messages(
    nodes: list[_Node], actions: Actions, numbers: dict[Action, int], stage_workers: Sequence[int]
) -> dict[_Key, int]:
    """A node for each message, after the action that makes it and the message before it on its edge."""
    found: dict[_Key, int] = {}
    latest: dict[tuple[int, int, bool], int] = {}
    for worker, own in enumerate(actions):
        for action in own:
            given = _gives(action, stage_workers)
            if given is None:
                continue
            key, receiver = given
            edge = worker, receiver, key[1]
            before = [numbers[action], *([latest[edge]] if edge in latest else [])]
            kind = BACKWARD if key[1] else FORWARD
            nodes.append(_Node(worker, receiver, key[0], kind, key[2], before, is_p2p=True))
            found[key] = latest[edge] = len(nodes) - 1
    return found


def _post(
    nodes: list[_Node],
    actions: Actions,
    numbers: dict[Action, int],
    messages: dict[_Key, int],
    stage_workers: Sequence[int],
    ahead: int,
) -> None:
    """Which action posts the receive of each message, as the engine's mailboxes do: `ahead` at the start of the step,
    then one for each that is taken; out of turn when an action is reached that needs a later one."""
    waiting: dict[tuple[int, int, bool], list[_Key]] = {}
    for worker, own in enumerate(actions):
        for action in own:
            given = _gives(action, stage_workers)
            if given is not None:
                waiting.setdefault((worker, given[1], given[0][1]), []).append(given[0])
    position = dict.fromkeys(waiting, 0)
    posted: dict[tuple[int, int, bool], set[_Key]] = {edge: set() for edge in waiting}

    def post(edge: tuple[int, int, bool], upto: int, action: int, reached: int) -> None:
        while len(posted[edge]) < upto and position[edge] < len(waiting[edge]):
            key = waiting[edge][position[edge]]
            position[edge] += 1
            posted[edge].add(key)
            if action >= 0:
                nodes[messages[key]].posted_by = action
            elif reached >= 0:
                nodes[messages[key]].before.append(reached)

    for edge in waiting:
        post(edge, ahead, -1, -1)
    for worker, own in enumerate(actions):
        previous = -1
        for action in own:
            key = _needs(action, stage_workers)
            if key is not None and key in messages:
                edge = stage_workers[key[0]], worker, key[1]
                while key not in posted[edge]:
                    post(edge, len(posted[edge]) + 1, -1, previous)
                posted[edge].discard(key)
                post(edge, ahead, numbers[action], -1)
            previous = numbers[action]


def _in_levels(nodes: list[_Node], num_workers: int, stage_workers: Sequence[int]) -> ActionGraph:
    """The nodes sorted by level: one more than the highest of those that they wait for."""
    level = [-1] * len(nodes)
    following: list[list[int]] = [[] for _ in nodes]
    missing = [0] * len(nodes)
    for number, node in enumerate(nodes):
        assert len(node.before) <= _NUM_BEFORE
        for one in (*node.before, node.posted_by):
            if one >= 0:
                following[one].append(number)
                missing[number] += 1
    ready = [number for number, count in enumerate(missing) if not count]
    current = 0
    while ready:
        after: list[int] = []
        for number in ready:
            level[number] = current
            for one in following[number]:
                missing[one] -= 1
                if not missing[one]:
                    after.append(one)
        ready, current = after, current + 1
    assert min(level, default=0) >= 0, "the actions wait for each other in a circle"
    order = np.argsort(np.array(level), kind="stable")
    place = np.empty(len(nodes) + 1, dtype=np.int64)
    place[order] = np.arange(len(nodes))
    place[-1] = len(nodes)  # index -1: nobody
    ordered = [nodes[number] for number in order]
    none = [-1] * _NUM_BEFORE
    before = np.array([(node.before + none)[:_NUM_BEFORE] for node in ordered], dtype=np.int64)
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
        after_end=place[before.reshape(-1, _NUM_BEFORE)],
        after_start=place[np.array([node.posted_by for node in ordered], dtype=np.int64)],
        bounds=np.searchsorted(np.array(level)[order], np.arange(current + 1)),
    )
