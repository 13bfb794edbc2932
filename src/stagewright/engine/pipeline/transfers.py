"""The P2P transfers of a pipeline pass: their order, and what the arrival of one implies. Nothing here sends.

    worker 0   F0 ──► F1 ──►            ┌─► B0     gradient 0 arrives: worker 1 has received activation 0 long ago,
    worker 1      └─► F0    B0 ─────────┘          so worker 0 can free its send buffer

A send is complete when the peer has received it, but Gloo reports that only to a caller that waits, and waiting for a
peer in the middle of a schedule can deadlock. So no worker waits: it infers from what arrives how far the peer has got.

A receive is posted ahead, but not before this worker has finished every action that the transfer depends on, directly
or through other workers. Posted earlier it can't complete. On a GPU, where an open receive is a running kernel,
anything that synchronizes the device (the first use of a kernel, freeing memory) would then deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stagewright.schedules.action_order import Action, Actions, Kind


@dataclass(frozen=True, slots=True)
class Transfer:
    """The tensors that one micro-batch sends over one cut in one direction."""

    cut: int
    """Index of the cut: the one after stage ``cut``."""
    microbatch: int
    backward: bool
    """Whether these are gradients."""


@dataclass(frozen=True, slots=True)
class ReceivePlan:
    """The transfers that one worker receives in a pass over the actions."""

    orders: Mapping[tuple[int, bool], Iterable[Transfer]]
    """For each (peer, is backward), the transfers to this worker in the order in which the peer sends them."""
    acknowledges: Mapping[Transfer, tuple[Transfer, ...]]
    """For each transfer, the sends of this worker that the peer has received by then, and had not one transfer ago."""
    after: Mapping[Transfer, int]
    """For each transfer, how many of its own actions this worker finishes before the peer can send it."""


def plan_receives(
    actions: Actions, stage_workers: Sequence[int], worker: int, needs_gradient: Sequence[Sequence[bool]]
) -> ReceivePlan:
    """Plan what a worker receives; ``needs_gradient`` says for each cut and tensor whether a gradient returns."""
    orders: dict[tuple[int, bool], list[Transfer]] = {}
    acknowledges: dict[Transfer, tuple[Transfer, ...]] = {}
    for peer, peer_actions in enumerate(actions):
        if peer == worker:
            continue
        newly_received: list[Transfer] = []
        for action in peer_actions:
            source, target = _transfers_of(action, len(stage_workers) - 1, needs_gradient)
            if source is not None and _end_worker(source, stage_workers, sends=True) == worker:
                newly_received.append(source)
            if target is not None and _end_worker(target, stage_workers, sends=False) == worker:
                orders.setdefault((peer, target.backward), []).append(target)
                acknowledges[target], newly_received = tuple(newly_received), []
    fixed_orders = {key: tuple(transfers) for key, transfers in orders.items()}
    return ReceivePlan(fixed_orders, acknowledges, _count_dependencies(actions, stage_workers, worker, needs_gradient))


def link_directions(stage_workers: Sequence[int], *, backward: bool) -> Iterator[tuple[int, int, bool]]:
    """Yield each (sender, receiver, is backward) that stages use, in an order that every worker can follow.

    Even cuts come first: most of them have no worker in common and open concurrently.
    """
    seen = set()
    for cut in sorted(range(len(stage_workers) - 1), key=lambda cut: (cut % 2, cut)):
        before, after = stage_workers[cut], stage_workers[cut + 1]
        directions = [(before, after, False)] + [(after, before, True)] * backward
        for direction in directions:
            if before != after and direction not in seen:
                seen.add(direction)
                yield direction


def _count_dependencies(
    actions: Actions, stage_workers: Sequence[int], worker: int, needs_gradient: Sequence[Sequence[bool]]
) -> dict[Transfer, int]:
    """Count for every transfer the actions of ``worker`` that it depends on, directly or through other workers."""
    counts: dict[Transfer, int] = {}
    reached = [0] * len(actions)
    positions = [0] * len(actions)
    progressed = True
    while progressed:
        progressed = False
        for index, worker_actions in enumerate(actions):
            while positions[index] < len(worker_actions):
                action = worker_actions[positions[index]]
                source, target = _transfers_of(action, len(stage_workers) - 1, needs_gradient)
                if source is not None and source not in counts:
                    break
                positions[index] += 1
                progressed = True
                inherited = counts[source] if source is not None else 0
                reached[index] = positions[index] if index == worker else max(reached[index], inherited)
                if target is not None:
                    counts[target] = reached[index]
    return counts


def _transfers_of(
    action: Action, last: int, needs_gradient: Sequence[Sequence[bool]]
) -> tuple[Transfer | None, Transfer | None]:
    """Return the transfer that an action needs and the one it produces; None at the ends of the model."""
    if action.kind is Kind.BACKWARD_WEIGHT:
        return None, None
    backward = action.kind is not Kind.FORWARD

    def crossing(cut: int) -> Transfer | None:
        exists = 0 <= cut < last and (not backward or any(needs_gradient[cut]))
        return Transfer(cut, action.microbatch, backward) if exists else None

    below, above = crossing(action.stage - 1), crossing(action.stage)
    return (above, below) if backward else (below, above)


def _end_worker(transfer: Transfer, stage_workers: Sequence[int], *, sends: bool) -> int:
    """Return the worker that sends a transfer, or the one that receives it."""
    return stage_workers[transfer.cut + (transfer.backward == sends)]
