"""Where the main thread of each worker spent a recorded step: parts that add up to it, from its events.

    forward, backward, weights, recompute, optimizer    computing (weights: the second half of a split backward)
    codec                                               encoding and decoding messages
    receive                                             waiting for messages
    send                                                handing messages over: the calls themselves
    until_sent                                          waiting until messages have left
    sums                                                waiting for collectives
    at_the_end                                          done, and waiting for the other workers
    between                                             the rest: Python between all that

`stagewright trace` divides waiting by its causes instead; here the calls count in which it happens.
"""

from __future__ import annotations

from typing import Any

from stagewright.trace.breakdown import busy_times, schedule_idle

__all__ = ["COMPUTING", "PARTS", "step_parts"]

COMPUTING = ("forward", "backward", "weights", "recompute", "optimizer")
PARTS = (*COMPUTING, "codec", "receive", "send", "until_sent", "sums", "at_the_end", "between")
_PART_OF_KIND = {"backward-input": "backward", "backward-weight": "weights", "encode": "codec", "decode": "codec"}
_PART_OF_NOTE = {"flush": "until_sent", "limit": "until_sent", "together": "at_the_end"}


def step_parts(trace: Any) -> list[dict[str, float]]:
    """For each worker the mean step, its parts, and how long it would idle if the schedule alone made it wait."""
    idle = [schedule_idle(trace, step) for step in trace.steps]
    found = []
    for worker in trace.workers:
        parts = dict.fromkeys(PARTS, 0.0)
        whole = sum(worker.step(step).seconds for step in trace.steps)
        for step in trace.steps:
            # What runs beside computing costs nothing until it is waited for.
            for event, own_s in busy_times([one for one in worker.of_step(step) if one.stream != "collective"]):
                parts[part_of(event)] += own_s
        parts["between"] = whole - sum(parts.values())
        parts |= {"step": whole, "schedule_idle": sum(one.get(worker.rank, 0.0) for one in idle)}
        found.append({f"{name}_s": seconds / len(trace.steps) for name, seconds in parts.items()})
    return found


def part_of(event: Any) -> str:
    """The part to which an event belongs."""
    kind = "sums" if event.kind == "collective" else _PART_OF_KIND.get(event.kind, event.kind)
    return _PART_OF_NOTE.get(event.note or "", kind)
