"""DeepSpeed's pipeline schedule: the order of its instructions, and the longest path through them.

Each stage executes one list of instructions in order (`TrainSchedule` of DeepSpeed 0.16). Stages alternate between a
forward step and a backward step; an exchange with a neighbor precedes each pass, first gradients, then activations:

    stage 0    F0            F1   ↓g0 ↑a1  B0   F2   ↓g1 ↑a2  B1   …
    stage 1        ↓a0  F0  B0    ↑g0 ↓a1  F1   B1   ↑g1 ↓a2  F2   …

So an activation leaves only after the gradient before it has arrived. A send waits for its receive, unless NCCL buffers
the message: then the link carries it while both stages compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["forward", "backward", "send activation", "send gradient", "take activation", "take gradient"]


class Instruction(NamedTuple):
    """One entry of a stage's list."""

    kind: Kind
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Times of a micro-batch on one stage."""

    forward_s: float
    """With what follows the arrival of an activation."""
    backward_s: float
    """With what follows the arrival of a gradient."""
    message_s: float
    """A message to the next stage, or from it."""


def instructions(stage: int, stages: int, microbatches: int) -> list[Instruction]:
    """Return the instructions of a stage in their order."""
    entries: list[Instruction] = []
    previous = -1

    def add(kind: Kind, microbatch: int, needed: bool = True) -> None:
        if needed and 0 <= microbatch < microbatches:
            entries.append(Instruction(kind, microbatch))

    for step in range(2 * (microbatches + stages - 1)):
        if step % 2 == stage % 2:
            current = step // 2 - stage // 2
            add("send gradient", previous, stage > 0)
            add("take activation", current, stage > 0)
            add("forward", current)
        else:
            current = step // 2 - stages + (stage + 1) // 2 + (stage % 2 == 0)
            add("take gradient", current, stage < stages - 1)
            add("send activation", previous, stage < stages - 1)
            add("backward", current)
        previous = current
    return entries


def pipeline_s(stages: Sequence[Stage], microbatches: int, *, buffered: bool) -> float:
    """Return the time from the first forward to the last backward.

    Args:
        stages: Times of each stage.
        microbatches: Micro-batches of the step.
        buffered: Whether a send returns at once, because the message fits in NCCL's buffers.
    """
    lists = [instructions(stage, len(stages), microbatches) for stage in range(len(stages))]
    clocks, positions = [0.0] * len(stages), [0] * len(stages)
    offers: dict[tuple[bool, int, int], float] = {}  # when a message's send began
    posts: dict[tuple[bool, int, int], float] = {}  # when its receive began
    arrivals: dict[tuple[bool, int, int], float] = {}
    links: dict[tuple[bool, int], float] = {}  # when a direction of a link is free
    while any(position < len(entries) for position, entries in zip(positions, lists, strict=True)):
        for index, (stage, entries) in enumerate(zip(stages, lists, strict=True)):
            while positions[index] < len(entries):
                kind, microbatch = entries[positions[index]]
                if kind in ("forward", "backward"):
                    clocks[index] += stage.forward_s if kind == "forward" else stage.backward_s
                    positions[index] += 1
                    continue
                sends, upward = kind.startswith("send"), kind.endswith("activation")
                link = index if sends == upward else index - 1
                key = (upward, link, microbatch)
                (offers if sends else posts).setdefault(key, clocks[index])
                if key not in arrivals and key in offers and (buffered or key in posts):
                    begin = offers[key] if buffered else max(offers[key], posts[key])
                    begin = max(begin, links.get((upward, link), 0.0))
                    arrivals[key] = links[upward, link] = begin + stages[link].message_s
                if not (buffered and sends):
                    if key not in arrivals:
                        break
                    clocks[index] = max(clocks[index], arrivals[key])
                positions[index] += 1
    return max(clocks)
