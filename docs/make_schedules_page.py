# ruff: noqa: E501 (a message that must stand in one line)
"""Write docs/schedules.md from the actions that the engine executes: `python docs/make_schedules_page.py`.

Drawings and figures are made by playing the actions of every worker on free links, a forward of half a worker's
layers taking one tick and a backward two (one for the inputs, one for the weights). The pictures are drawn by
`python docs/make_schedule_pictures.py`.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path

from stagewright.schedules.actions import Action, Actions, Kind, schedule_actions
from stagewright.schedules.catalog import PLACEMENTS, SCHEDULES

PAGE = Path(__file__).with_name("schedules.md")
TICK = 3  # characters

HEAD = """\
# Schedules

A schedule says in which order a worker of a pipeline does the forwards and backwards of its stages. It does not change
the result: every schedule is [proven equal to serial](compare.md#what-equal-means). It changes how long workers wait
and how much they hold. `stagewright compare MODEL --schedule NAME` takes one; so does `schedule` in a
[plan](plans.md#the-plan).

This page is made from the actions that the engine executes, by `python docs/make_schedules_page.py`, and its pictures by
`python docs/make_schedule_pictures.py`.

## Why workers wait

The last worker can't begin before a micro-batch has gone through all stages before it, and the first can't end before its
gradients have come back through all of them. That is the *bubble*: filling and draining the pipeline. A schedule can
make it smaller in three ways: shorter stages, so that the pipeline fills in smaller steps; a backward that is split in
two, so that what the worker before waits for comes first and the rest fills gaps; another place for the stages. Each is
paid for, with messages or with memory.

## The seven, drawn

In letters: two workers, four micro-batches, time to the right, all to the same scale. `F0` is the forward of micro-batch 0,
`B0` its backward; where a schedule splits the backward, `I0` is the part for the inputs (which the worker before waits for)
and `W0` the part for the weights (which no one waits for). A worker with two stages has its second one in small
letters.

In pictures: four workers, eight micro-batches, all to the same scale; a colour is a stage, a number a micro-batch. Forward is
in full colour, backward paler, the weights' part palest.

A backward takes twice as long as a forward; links are free; blank is waiting. A *tick* is the forward of half a worker's
layers: of its only stage a forward takes two, of one of its two stages one.
"""

WORDS = {
    "gpipe": "All forwards, then all backwards. Simple, takes any number of micro-batches, and holds all of them.",
    "1f1b": "The default. Each worker starts as few micro-batches as keep the workers behind it busy, then alternates. "
    "As long as GPipe, but worker *i* of *p* holds at most *p − i* micro-batches, however many there are.",
    "interleaved": "Two stages (or more) on each worker, so the pipeline fills in steps half as long. Shorter than "
    "1F1B, but twice as much crosses the links, and more is held.",
    "looped-bfs": "Two stages (or more) on each worker, all micro-batches through one before the next: GPipe's memory, "
    "interleaved's fill.",
    "interleaved-zero-bubble": "Interleaved with the backward split in two: weights' parts go where a worker would "
    "wait.",
    "zbv": "Two stages on each worker in the shape of a V: the first worker has the first and the last stage, so a "
    "micro-batch's backward begins where its forward ended. The backward is split; no one waits but in fill and drain.",
    "dualpipev": "ZBV's placement; in the steady phase forwards of one stage and backwards of the other alternate. The "
    "backward is split only where that fills a wait.",
}

SIDE_BY_SIDE = """\
## Side by side

Four workers, eight micro-batches, played as above. *Length* is in ticks; 48 would be no waiting at all. *Held* is how
many micro-batches each worker holds at most between forward and backward (for a split backward: until its weights'
part), counted in whole shares of a worker: a micro-batch in one of two stages is a half. It is what decides the memory
for activations.

| schedule | length | waiting | held by each worker | stages on a worker | placement | micro-batches (p workers) |
|---|---:|---:|---|---|---|---|
"""

IDEAL = """\
- **Begin with `1f1b`.** It is the default: no other holds less in all or sends less; it asks for one micro-batch a stage.
- **Waiting shows, and links are quick:** `interleaved`. Its fill is half as long; it sends twice as many messages.
- **Waiting still shows:** `zbv` or `interleaved-zero-bubble`. No worker holds more than the first does under `1f1b`, but
  the others hold as much as it.
- **Not sure:** [`stagewright plan`](plan.md) forecasts them on your cluster, `stagewright compare` runs them.

These are orders on ideal workers, not promises: real stages are not equal, a backward is not twice a forward, links
cost time, and each split backward walks the graph twice. `stagewright compare` measures.
"""

AFTER = """\
## Micro-batches: how many

- More micro-batches mean less waiting: the [bound](compare.md#the-bound) is p · m / (m + p − 1). Too many are too small
  to keep a core or a GPU busy.
- The batch need not be divisible: 10 samples in 4 micro-batches are 3, 3, 2, 2, and losses are weighted by samples. A
  batch must have at least one sample for each micro-batch of each replica.
- A smaller last batch has fewer micro-batches, of about the size of a full batch's
  ([batch norm](batch-norm-and-dropout.md#batch-norm) depends on it); those that do not exist are left out of the order,
  which stays valid.
- What each schedule asks for is in the table; a plan that does not fit is refused with the number that would:

```console
$ stagewright compare mlp-mnist --strategies pipeline --schedule dualpipev --microbatches 3
stagewright: schedule 'dualpipev' with 4 stages on 2 workers needs at least 4 micro-batches, not 3: use microbatches = 4, or schedule = "gpipe"
```

## Recomputation

`--recompute always` keeps a stage's inputs only and runs its forward again before its backward. `except-last` leaves
the last micro-batch as it is: under GPipe its backward comes at once, so nothing is gained by forgetting it. In a plan
file `recompute = [true, false]` answers for each stage. Dropout masks and batch norm's statistics are those of the
first forward: [batch norm and dropout](batch-norm-and-dropout.md#recomputation). Where the backward is split,
a stage that runs again does all of its backward in the first part: to keep what it ran again until the second would take
the memory that was to be saved.

## Placement

    in-order         worker 0: s0     worker 1: s1          two stages each:   0: s0 s2    1: s1 s3
    v                                                                          0: s0 s3    1: s1 s2
    client-server    worker 0 (the client): s0 s2    worker 1: s1

`client-server` runs with `gpipe` and `1f1b`: the first and the last stage are at the client, so data and labels never
leave it.

## Evaluation and inference

Forward alone needs no schedule: stage *s* does micro-batch *k* at tick *s + k*, for every placement. With
`--inference` the batches are one stream: the pipeline fills once for all of them, with two receives posted ahead on
each link, not once a batch.

The orders of the last five come from torch's own schedule classes; the engine that executes them is
[our own](decisions/0007-custom-pipeline-executor.md).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A schedule in time."""

    spans: tuple[tuple[tuple[Action, int, int], ...], ...]
    """For each worker, its actions with begin and end, in ticks."""
    held: tuple[float, ...]
    """For each worker, the most micro-batches that it held at once, in shares of its layers."""

    @property
    def length(self) -> int:
        """Ticks until the last worker is done."""
        return max(end for spans in self.spans for _, _, end in spans)

    @property
    def waiting(self) -> float:
        """Share of the workers' time in which they do nothing."""
        busy = sum(end - begin for spans in self.spans for _, begin, end in spans)
        return 1 - busy / (self.length * len(self.spans))


def play(actions: Actions, stages_per_worker: int) -> Played:
    """Begin every action as early as its worker and what it needs allow."""
    unit = 2 // stages_per_worker
    takes = {Kind.FORWARD: unit, Kind.BACKWARD: 2 * unit, Kind.BACKWARD_INPUT: unit, Kind.BACKWARD_WEIGHT: unit}
    num_stages = 1 + max(action.stage for worker in actions for action in worker)
    ends: dict[Action, int] = {}
    left = [list(worker) for worker in actions]
    spans: list[list[tuple[Action, int, int]]] = [[] for _ in actions]
    while any(left):
        ready = [worker for worker, rest in enumerate(left) if rest and _needs(rest[0], num_stages, ends) is not None]
        assert ready, "the schedule waits for itself"
        for worker in ready:
            action = left[worker].pop(0)
            needs = _needs(action, num_stages, ends)
            assert needs is not None
            begin = max(needs, spans[worker][-1][2] if spans[worker] else 0)
            ends[action] = begin + takes[action.kind]
            spans[worker].append((action, begin, ends[action]))
    return Played(spans=tuple(map(tuple, spans)), held=tuple(_held(worker, stages_per_worker) for worker in actions))


def _needs(action: Action, num_stages: int, ends: dict[Action, int]) -> int | None:
    """When everything that an action needs is there; None where that is not known yet."""
    stage, number = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        groups = [[Action(Kind.FORWARD, stage - 1, number)]] if stage else []
    elif action.kind is Kind.BACKWARD_WEIGHT:
        groups = [[Action(Kind.BACKWARD_INPUT, stage, number)]]
    else:
        groups = [[Action(Kind.FORWARD, stage, number)]]
        if stage + 1 < num_stages:
            groups.append([Action(kind, stage + 1, number) for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)])
    times = [next((ends[one] for one in group if one in ends), None) for group in groups]
    return None if None in times else max([0, *(time for time in times if time is not None)])


def _held(actions: tuple[Action, ...], stages_per_worker: int) -> float:
    now = most = 0
    for action in actions:
        now += action.kind is Kind.FORWARD
        most = max(most, now)
        now -= action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    return most / stages_per_worker


def drawing(played: Played) -> str:
    """One line a worker."""
    lines = []
    for worker, spans in enumerate(played.spans):
        first = min(action.stage for action, _, _ in spans)
        line = ""
        for action, begin, end in spans:
            kind = action.kind.value if action.stage == first else action.kind.value.lower()
            word = f"{kind}{action.microbatch}"
            line = line.ljust(begin * TICK) + word + "─" * ((end - begin) * TICK - len(word) - 1) + " "
        lines.append(f"worker {worker}   {line}".rstrip())
    return "\n".join(lines)


def played(schedule: str, num_workers: int, num_microbatches: int) -> Played:
    rule = SCHEDULES[schedule]
    place = PLACEMENTS[rule.placement](rule.stages_per_worker * num_workers, num_workers)
    return play(schedule_actions(schedule, place, num_microbatches), rule.stages_per_worker)


def asks(schedule: str) -> str:
    """What a schedule asks of the number of micro-batches, in words."""
    rule = SCHEDULES[schedule]
    least = [rule.min_microbatches(rule.stages_per_worker * workers, workers) for workers in (3, 4)]
    words = {(1, 1): "", (3, 4): "at least as many as stages", (6, 8): "at least 2p"}[least[0], least[1]]
    return " and ".join(filter(None, [words, "a multiple of p" if rule.rounds else ""])) or "any number"


def _row(schedule: str) -> list[str]:
    rule, one = SCHEDULES[schedule], played(schedule, 4, 8)
    stages = f"{rule.stages_per_worker} or more" if rule.any_number_of_stages else f"{rule.stages_per_worker}"
    held = ", ".join(f"{value:g}" for value in one.held)
    return [f"`{schedule}`", f"{one.length}", f"{one.waiting:.0%}", held, stages, rule.placement, asks(schedule)]


def schedules_page() -> str:
    """The whole page."""
    parts = [HEAD]
    for schedule in SCHEDULES:
        words = textwrap.fill(WORDS[schedule], 120, break_on_hyphens=False)
        picture = f"![{schedule} on four workers](pictures/schedules/{schedule}.svg)"
        parts.append(f"### {schedule}\n\n{words}\n\n```text\n{drawing(played(schedule, 2, 4))}\n```\n\n{picture}\n")
    parts.append(SIDE_BY_SIDE + "".join(f"| {' | '.join(_row(schedule))} |\n" for schedule in SCHEDULES))
    parts.append(IDEAL)
    parts.append(AFTER)
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(schedules_page(), encoding="utf-8")
