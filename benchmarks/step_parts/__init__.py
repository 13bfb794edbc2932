"""Breakdown of a recorded step of each worker's main thread, from its events; the parts add up to the step.

    forward, backward, weights, recompute, optimizer    compute (weights: weight gradients of a split backward)
    codec                                               encoding and decoding messages
    receive                                             waiting for receives
    send                                                the calls that start sends
    until_sent                                          waiting for sends to complete
    sums                                                waiting for collectives
    at_the_end                                          done, waiting for the other workers
    between                                             the rest: Python between all of these

`stagewright trace` divides waiting by its causes instead; here it counts for the call in which it happens.
"""

from __future__ import annotations

from typing import Any

from stagewright.trace.breakdown import schedule_idle, self_times

__all__ = ["COMPUTING", "PARTS", "step_parts"]

COMPUTING = ("forward", "backward", "weights", "recompute", "optimizer")
PARTS = (*COMPUTING, "codec", "receive", "send", "until_sent", "sums", "at_the_end", "between")
_PART_OF_KIND = {"backward-input": "backward", "backward-weight": "weights", "encode": "codec", "decode": "codec"}
_PART_OF_NOTE = {"flush": "until_sent", "limit": "until_sent", "together": "at_the_end"}


def step_parts(trace: Any) -> list[dict[str, float]]:
    """Return each worker's mean step, its parts, and the idle time that the schedule alone causes."""
    idle = [schedule_idle(trace, step) for step in trace.steps]
    breakdowns = []
    for worker in trace.workers:
        parts = dict.fromkeys(PARTS, 0.0)
        total_s = sum(worker.step(step).seconds for step in trace.steps)
        for step in trace.steps:
            # Overlapped collectives cost nothing until the worker waits for them.
            for event, own_s in self_times([event for event in worker.of_step(step) if event.stream != "collective"]):
                parts[part_of(event)] += own_s
        parts["between"] = total_s - sum(parts.values())
        parts |= {"step": total_s, "schedule_idle": sum(idle_s.get(worker.rank, 0.0) for idle_s in idle)}
        breakdowns.append({f"{name}_s": seconds / len(trace.steps) for name, seconds in parts.items()})
    return breakdowns


def part_of(event: Any) -> str:
    """Return the part to which an event belongs."""
    kind = "sums" if event.kind == "collective" else _PART_OF_KIND.get(event.kind, event.kind)
    return _PART_OF_NOTE.get(event.note or "", kind)
