"""Which messages pass between the workers of a pipeline, and what the arrival of one tells. Nothing here sends.

    worker 0   F0 ──► F1 ──►            ┌─► B0     gradient 0 arrives: worker 1 must have taken activation 0 long ago,
    worker 1      └─► F0    B0 ─────────┘          and worker 0 may let go of what it sent

A send is over when the peer has taken it, but Gloo tells so only to one who waits, and waiting for a peer in the middle
of a schedule can be a circle. So no worker waits: it sees from what arrives how far the peer has come.

A receive is posted ahead, but not before this worker has done all that the message waits for, over any number of
workers: posted earlier it can't end, and on a GPU, where an open receive is a running kernel, whatever waits for the
whole device (the first use of a kernel, memory given back) would wait for what comes only after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stagewright.schedules.actions import Action, Actions, Kind

__all__ = ["Message", "Traffic", "channels", "traffic"]


@dataclass(frozen=True, slots=True)
class Message:
    """One crossing of one micro-batch in one direction."""

    edge: int
    """The edge after this stage."""
    microbatch: int
    """Which micro-batch."""
    backward: bool
    """Gradients on their way back."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one worker receives in a pass over the actions."""

    orders: Mapping[tuple[int, bool], Iterable[Message]]
    """For each peer and direction, the messages to this worker in the order in which the peer sends them."""
    taken: Mapping[Message, tuple[Message, ...]]
    """For each of them, messages from this worker that the peer has taken by then, and had not one message before."""
    after: Mapping[Message, int]
    """For each of them, how many of its own actions this worker must have done before it can be sent."""


def traffic(
    actions: Actions, stage_workers: Sequence[int], own: int, needs_gradient: Sequence[Sequence[bool]]
) -> Traffic:
    """The traffic of the worker ``own``; ``needs_gradient`` says for each edge and value whether a gradient returns."""
    orders: dict[tuple[int, bool], list[Message]] = {}
    taken: dict[Message, tuple[Message, ...]] = {}
    for peer, theirs in enumerate(actions):
        if peer == own:
            continue
        since: list[Message] = []
        for action in theirs:
            source, target = _ends(action, len(stage_workers) - 1, needs_gradient)
            if source is not None and _far_worker(source, stage_workers, sends=True) == own:
                since.append(source)
            if target is not None and _far_worker(target, stage_workers, sends=False) == own:
                orders.setdefault((peer, target.backward), []).append(target)
                taken[target], since = tuple(since), []
    received = {key: tuple(messages) for key, messages in orders.items()}
    return Traffic(received, taken, _after(actions, stage_workers, own, needs_gradient))


def channels(stage_workers: Sequence[int], *, backward: bool) -> Iterator[tuple[int, int, bool]]:
    """Each sender, receiver and direction that stages use, in an order that every worker can follow.

    Those of every second edge come first: most of them have no worker in common, and open at the same time.
    """
    seen = set()
    for edge in sorted(range(len(stage_workers) - 1), key=lambda edge: (edge % 2, edge)):
        before, after = stage_workers[edge], stage_workers[edge + 1]
        both = [(before, after, False)] + [(after, before, True)] * backward
        for channel in both:
            if before != after and channel not in seen:
                seen.add(channel)
                yield channel


def _after(
    actions: Actions, stage_workers: Sequence[int], own: int, needs_gradient: Sequence[Sequence[bool]]
) -> dict[Message, int]:
    """For every message, how many actions of the worker ``own`` come before it, whoever is in between."""
    found: dict[Message, int] = {}
    reached = [0] * len(actions)
    at = [0] * len(actions)
    moved = True
    while moved:
        moved = False
        for worker, theirs in enumerate(actions):
            while at[worker] < len(theirs):
                source, target = _ends(theirs[at[worker]], len(stage_workers) - 1, needs_gradient)
                if source is not None and source not in found:
                    break
                at[worker] += 1
                moved = True
                before = found[source] if source is not None else 0
                reached[worker] = at[worker] if worker == own else max(reached[worker], before)
                if target is not None:
                    found[target] = reached[worker]
    return found


def _ends(action: Action, last: int, needs_gradient: Sequence[Sequence[bool]]) -> tuple[Message | None, Message | None]:
    """What an action takes before it computes, and what it gives after; None at the ends of the model."""
    stage, number = action.stage, action.microbatch
    if action.kind is Kind.BACKWARD_WEIGHT:
        return None, None
    backward = action.kind is not Kind.FORWARD

    def crossing(edge: int) -> Message | None:
        travels = 0 <= edge < last and (not backward or any(needs_gradient[edge]))
        return Message(edge, number, backward) if travels else None

    below, above = crossing(stage - 1), crossing(stage)
    return (above, below) if backward else (below, above)


def _far_worker(message: Message, stage_workers: Sequence[int], *, sends: bool) -> int:
    """Who sends this message, or who receives it."""
    return stage_workers[message.edge + (message.backward == sends)]
