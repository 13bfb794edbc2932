# ruff: noqa: E501 (an error message must be on one line)
"""Write docs/schedules.md from the actions that the engine executes: `python docs/make_schedules_page.py`.

Diagrams and figures come from a simulation with free links: the forward of half a worker's layers takes one tick, its
backward two (input gradient and weight gradient). `python docs/make_schedule_pictures.py` draws the pictures.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stagewright.schedules.action_order import SEARCHED, Action, Actions, Kind, schedule_actions
from stagewright.schedules.order_search.problem import OrderProblem
from stagewright.schedules.order_search.search import search_orders
from stagewright.schedules.order_search.timing import OrderTimer
from stagewright.schedules.rules import FIXED_SCHEDULES, PLACEMENTS, SCHEDULES, Placement

PAGE = Path(__file__).with_name("schedules.md")
TICK = 3  # characters
UNEQUAL = (1.0, 1.5, 1.0, 0.75)  # the layers of each worker, relative to the first

HEAD = """\
# Schedules

A schedule is the order in which each pipeline worker runs the forwards and backwards of its stages. It does not change the
result: every schedule is [verified against the single-device baseline](compare.md#parity-check). It changes how long workers
wait and how many activations they hold. Select one with `stagewright compare MODEL --schedule NAME`, or with `schedule` in a
[plan](plans.md#plan-file).

This page is generated from the actions that the engine executes, by `python docs/make_schedules_page.py`, and its pictures by
`python docs/make_schedule_pictures.py`.

## Pipeline bubble

The last worker can't start before a micro-batch has passed all earlier stages, and the first can't finish before its
gradients have come back through all later stages. This idle time in warm-up and drain is the *pipeline bubble*. Schedules
reduce it in three ways: shorter stages, so that the pipeline fills in smaller steps; a backward split into input gradient,
which the previous worker waits for, and weight gradient, which fills gaps (zero-bubble schedules); or a different placement
of the stages. Each costs communication or memory.

## Schedule diagrams

The text diagrams show two workers and four micro-batches, with time to the right. `F0` is the forward of micro-batch 0 and
`B0` its backward. Where a schedule splits the backward, `I0` is the input gradient, which the previous worker waits for, and
`W0` the weight gradient, which no worker waits for. Lowercase letters are the second stage of a worker.

The pictures show four workers and eight micro-batches. Colors are stages, numbers are micro-batches. Forward has the full
color, backward is paler, weight gradients are palest.

A backward takes twice as long as a forward, and links are free. Blanks are idle time. A *tick* is the forward of half a
worker's layers: the forward of an only stage takes two ticks, that of one of two stages one. All diagrams of a kind have the
same scale.
"""

DESCRIPTIONS = {
    "gpipe": "All forwards, then all backwards. Simple; any number of micro-batches, all of them in flight at once.",
    "1f1b": "One forward, one backward (the default). In warm-up, each worker starts just enough micro-batches to keep "
    "the later workers busy; then it alternates. As long as GPipe, but worker *i* of *p* has at most *p − i* "
    "micro-batches in flight, regardless of their total number.",
    "interleaved": "Two or more stages per worker, so the pipeline fills in steps half as long. Faster than 1F1B, but "
    "with twice the P2P traffic and more activation memory.",
    "looped-bfs": "Two or more stages per worker; all micro-batches pass one stage before the next. The memory of "
    "GPipe with the bubble of interleaved.",
    "interleaved-zero-bubble": "Interleaved with a split backward: weight gradients fill the bubble.",
    "zbv": "Zero bubble with V placement: two stages per worker, the first worker holds the first and the last stage, "
    "so the backward of a micro-batch starts where its forward ended. The backward is split; workers are idle only "
    "during warm-up and drain.",
    "dualpipev": "ZBV's placement; in the steady phase, forwards of one stage alternate with backwards of the other. "
    "The backward is split only where that fills idle time.",
    "searched": "The order is searched for the measured times of the stages and the memory limit of the workers, and "
    "stored in the plan: [searched orders](#searched-orders). Here with equal stages, one per worker, and memory for as "
    "many micro-batches as the first worker has in flight under `1f1b`.",
}

COMPARISON = """\
## Comparison

Four workers and eight micro-batches, simulated as above. *Ticks* is the length of a step; 48 ticks would be no bubble.
*Micro-batches in flight* is the maximum number between forward and backward (with a split backward, the weight gradient) on
each worker, as a share of the worker's layers: a micro-batch in one of two stages counts a half. It determines the memory of
saved activations.

| schedule | ticks | bubble | micro-batches in flight, by worker | stages per worker | placement | micro-batches (p workers) |
|---|---:|---:|---|---|---|---|
"""

ADVICE = """\
- **Start with `1f1b`**, the default: no schedule has fewer micro-batches in flight in total or less traffic. It needs at least
  one micro-batch per stage.
- **The bubble matters, and links are fast:** `interleaved`. Half the bubble, twice as many P2P messages.
- **The bubble still matters:** `zbv` or `interleaved-zero-bubble`. Every worker has as many micro-batches in flight as the first
  under `1f1b`.
- **Stages are unequal, or memory is short:** [`searched`](#searched-orders), an order for your times and your limit.
- **Not sure:** [`stagewright plan`](forecast.md#plan-search) forecasts all of them on your cluster, `stagewright compare` runs them.

These figures are for ideal workers. Real stages are unequal, a backward is not exactly twice a forward, links take time, and a
split backward traverses the autograd graph twice. `stagewright compare` measures.
"""

SEARCHED_ORDERS = """\
## Searched orders

The seven schedules above are made for equal stages, and split every backward, or none, by a pattern. `--schedule searched`
searches an order for your model and your devices:

```console
$ stagewright compare digits-vit --strategy pipeline --schedule searched --memory 1GiB
```

`stagewright train --schedule searched` does the same, and `stagewright plan --schedules 1f1b,zbv,searched` ranks such plans beside
others.

- **Input**: forward (F), input gradient (I) and weight gradient (W) of each stage, the whole backward (B), which costs less than I
  and W, transfers, gradient all-reduce and optimizer step of each worker, all measured as for a [forecast](forecast.md), and the
  memory limit of each device. Without a limit (`--memory`, or the cluster's), an order may hold all micro-batches.
- **Search**: list scheduling with many rules, then changes along the critical path; of small pipelines all orders. It takes seconds,
  and equal inputs give equal orders. The built-in schedules take part, and orders are compared by their forecasts: for the same
  stages, none that fits is better. Unless the plan fixes `stages`, `cuts` or `placement`, one stage per worker, two in order and
  two as a V are compared.
- **Result**: the plan key [`actions`](plans.md#plan-file), one line per worker. All workers read the same order, a run can be
  repeated, and you can write or edit an order yourself: an action is its stage, its kind (F, B, I, W) and its micro-batch. An order
  that misses an action or would deadlock is refused.

How much it gains depends on how unequal the stages are. Four workers and eight micro-batches as above, but the second worker's
layers take half as long again, the last worker's a quarter less, and I and W together take a tenth longer than B:

| schedule | ticks | micro-batches in flight, at most |
|---|---:|---:|
"""

DETAILS = """\
## Number of micro-batches

- More micro-batches shrink the bubble: the [bubble bound](compare.md#bubble-bound) is p · m / (m + p − 1). Too small ones leave a
  core or GPU underutilized.
- The batch need not be divisible: 10 samples in 4 micro-batches are 3, 3, 2, 2, and losses are weighted by samples. A batch
  needs at least one sample for each micro-batch of each replica.
- A smaller last batch has fewer micro-batches, of about the same size ([batch norm](compare.md#batch-norm-and-dropout)
  depends on it). The order without the missing ones stays valid.
- The table lists what each schedule requires. A plan that does not meet it is refused, and the error names the required number:

```console
$ stagewright compare mlp-mnist --strategy pipeline --schedule dualpipev --microbatches 3
stagewright: schedule 'dualpipev' with 4 stages on 2 workers needs at least 4 micro-batches, not 3: use microbatches = 4, or schedule = "gpipe"
```

## Activation checkpointing

`--recompute always` saves only a stage's inputs and recomputes its forward before its backward. Without a pipeline, each block
is such a stage on the same device, so that backward recomputes one block at a time (FSDP and tensor
parallelism recompute the whole model at once: cut it into pipeline stages). `except-last` does not
recompute the last micro-batch: under GPipe its backward follows immediately, so checkpointing it saves nothing. In a plan
file, `recompute = [true, false]` sets it per stage.

`--recompute vit.layers.0,vit.layers.1`, or `recompute = ["vit.layers.0", "vit.layers.1"]` in a plan file, recomputes only these
units (names as in `stagewright profile`), one at a time; all others save their activations. Every strategy and schedule supports it.
Under a memory limit `stagewright plan` chooses the units and the cuts together, where recomputing whole stages would
recompute more than the memory requires ([decision 54](decisions/0054-memory-by-unit.md)). `stagewright fit` does the same for the
largest batch, sequence or number of layers.

`--recompute attention` is selective recomputation inside blocks, as Megatron-LM's `--recompute-granularity selective`: everything is
saved except what attention computes between its linear layers (scores, softmax, dropout masks). The linear layers are not repeated.
With eager attention, or dropout inside it on CPUs, the scores are most of the activation memory of long sequences, and recomputing them
takes a small part of the time. A fused kernel without dropout saves no scores, and there is little to gain. Attention modules
are found by their structure; a model that has none inside its units is refused, and so are `--compile`, `--sequence-parallel` and context
parallelism ([decision 59](decisions/0059-attention-alone.md)).

## Offload

`--offload vit.layers.0,vit.layers.1`, or `offload = ["vit.layers.0", "vit.layers.1"]` in a plan file, moves what these units save for
backward to pinned host memory; `--offload always` moves that of all units. Copies run on a CUDA stream of their own beside the
compute of later units, and come back ahead of their backward. So they cost nothing as long as a stage's copies take no longer than its
forward, and in backward no longer than that. Parameters, buffers and tensors below 1 KiB stay on the device.

Units can be kept, recomputed and offloaded in one plan: `recompute` and `offload` name different units. Under a memory limit
`stagewright plan` chooses among keeping, recomputation, recomputation of attention alone and offload for each unit, together with the
cuts, where the rate between GPU and host is known: it is measured on this machine's GPUs, and stated by
[`[links.host]`](plans.md#links) in a cluster file.

Every strategy and schedule supports offload. Refused are inference, `--compile`, CUDA graphs, and stages that are recomputed as a
whole. On a CPU, whose memory is the host's, a plan with offload runs and is verified, and memory is counted as on a GPU, but nothing is
gained ([decision 64](decisions/0064-offload-by-unit.md)).

## Random numbers and split backward

Dropout masks and batch norm statistics are those of the first forward:
[batch norm and dropout](compare.md#batch-norm-and-dropout). With a split backward, a recomputed stage runs
its whole backward in the first half: saving the recomputed activations until the second would take the memory that
checkpointing saves. A stage with offloaded units does the same.

## Placement

    in-order         worker 0: s0     worker 1: s1          two stages each:   0: s0 s2    1: s1 s3
    v                                                                          0: s0 s3    1: s1 s2
    client-server    worker 0 (the client): s0 s2    worker 1: s1

`client-server` runs with `gpipe` and `1f1b`. The client holds the first and the last stage, so data and labels never leave it.

## Evaluation and inference

Forward alone needs no schedule: stage *s* runs micro-batch *k* at tick *s + k*, for every placement. With `--inference` the
batches form one stream. The pipeline fills once instead of once per batch, with two receives posted ahead on each link.

The orders of the last five of the seven schedules come from torch's schedule classes; Stagewright's
[own executor](decisions/0007-custom-pipeline-executor.md) runs them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTimeline:
    """A schedule, simulated on ideal workers with free links."""

    spans: tuple[tuple[tuple[Action, int, int], ...], ...]
    """For each worker, its actions with start and end, in ticks."""
    in_flight: tuple[float, ...]
    """For each worker, the maximum number of micro-batches in flight, as a share of its layers."""

    @property
    def ticks(self) -> int:
        """Length of the step."""
        return max(end for spans in self.spans for _, _, end in spans)

    @property
    def bubble(self) -> float:
        """Share of the workers' time in which they are idle."""
        busy = sum(end - start for spans in self.spans for _, start, end in spans)
        return 1 - busy / (self.ticks * len(self.spans))


def simulate(schedule: str, num_workers: int, num_microbatches: int) -> ScheduleTimeline:
    """Simulate a schedule with its default number of stages and placement."""
    rule = SCHEDULES[schedule]
    stage_workers = PLACEMENTS[rule.placement](rule.stages_per_worker * num_workers, num_workers)
    if schedule == SEARCHED:
        problem = order_problem(stage_workers, num_microbatches, [1.0] * num_workers, num_workers)
        actions = search_orders(problem)[0].actions
    else:
        actions = schedule_actions(schedule, stage_workers, num_microbatches)
    return ScheduleTimeline(
        spans=_spans(actions, rule.stages_per_worker),
        in_flight=tuple(_max_in_flight(worker, rule.stages_per_worker) for worker in actions),
    )


def order_problem(
    stage_workers: tuple[int, ...],
    num_microbatches: int,
    scales: Sequence[float],
    max_in_flight: float,
    split_cost: float = 1.0,
) -> OrderProblem:
    """Return the search for an order on workers whose layers take `scales` times as long, in ticks."""
    num_workers = max(stage_workers) + 1
    each = len(stage_workers) // num_workers
    units = [scales[worker] * 2 / each for worker in stage_workers]

    def table(factor: float) -> tuple[tuple[float, ...], ...]:
        return tuple((factor * unit,) * num_microbatches for unit in units)

    return OrderProblem(
        stage_workers=stage_workers,
        action_s=(table(1.0), table(2.0), table(split_cost), table(split_cost)),
        link_s=table(0.0)[1:],
        saved_bytes=((1,) * num_microbatches,) * len(units),
        pending_bytes=((0,) * num_microbatches,) * len(units),
        limit_bytes=(max_in_flight * each,) * num_workers,
        tail_s=(0.0,) * num_workers,
        can_split=(True,) * len(units),
    )


def unequal_rows() -> list[tuple[str, float, float]]:
    """Return name, ticks and the most micro-batches in flight of every schedule on unequal workers."""
    layouts: list[tuple[Placement, int]] = [("in-order", 1), ("in-order", 2), ("v", 2)]
    rows = []
    for schedule in FIXED_SCHEDULES:
        rule = SCHEDULES[schedule]
        workers = PLACEMENTS[rule.placement](rule.stages_per_worker * 4, 4)
        actions = schedule_actions(schedule, workers, 8)
        in_flight = max(_max_in_flight(line, rule.stages_per_worker) for line in actions)
        problem = order_problem(workers, 8, UNEQUAL, 8, 1.1)
        rows.append((f"`{schedule}`", OrderTimer(problem).time(problem.encode(actions)).step_s, in_flight))
    for limit in (4, 8):
        found = []
        for placement, each in layouts:
            problem = order_problem(PLACEMENTS[placement](4 * each, 4), 8, UNEQUAL, limit, 1.1)
            order = search_orders(problem)[0]
            found.append((order.step_s, max(_max_in_flight(line, each) for line in order.actions)))
        rows.append((f"`searched`, memory for {limit}", *min(found)))
    return rows


def _spans(actions: Actions, stages_per_worker: int) -> tuple[tuple[tuple[Action, int, int], ...], ...]:
    """Start every action as early as its worker and its dependencies allow."""
    unit = 2 // stages_per_worker
    durations = {Kind.FORWARD: unit, Kind.BACKWARD: 2 * unit, Kind.BACKWARD_INPUT: unit, Kind.BACKWARD_WEIGHT: unit}
    num_stages = 1 + max(action.stage for worker in actions for action in worker)
    ends: dict[Action, int] = {}
    queues = [list(worker) for worker in actions]
    spans: list[list[tuple[Action, int, int]]] = [[] for _ in actions]
    while any(queues):
        ready = [
            worker for worker, queue in enumerate(queues) if queue and _ready_at(queue[0], num_stages, ends) is not None
        ]
        assert ready, "the schedule deadlocks"
        for worker in ready:
            action = queues[worker].pop(0)
            ready_at = _ready_at(action, num_stages, ends)
            assert ready_at is not None
            start = max(ready_at, spans[worker][-1][2] if spans[worker] else 0)
            ends[action] = start + durations[action.kind]
            spans[worker].append((action, start, ends[action]))
    return tuple(map(tuple, spans))


def _ready_at(action: Action, num_stages: int, ends: dict[Action, int]) -> int | None:
    """Return when the dependencies of an action are done; None if that is not known yet."""
    stage, number = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        dependencies = [[Action(Kind.FORWARD, stage - 1, number)]] if stage else []
    elif action.kind is Kind.BACKWARD_WEIGHT:
        dependencies = [[Action(Kind.BACKWARD_INPUT, stage, number)]]
    else:
        dependencies = [[Action(Kind.FORWARD, stage, number)]]
        if stage + 1 < num_stages:
            dependencies.append([Action(kind, stage + 1, number) for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)])
    times = [next((ends[step] for step in options if step in ends), None) for options in dependencies]
    return None if None in times else max([0, *(time for time in times if time is not None)])


def _max_in_flight(actions: tuple[Action, ...], stages_per_worker: int) -> float:
    current = maximum = 0
    for action in actions:
        current += action.kind is Kind.FORWARD
        maximum = max(maximum, current)
        current -= action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    return maximum / stages_per_worker


def diagram(timeline: ScheduleTimeline) -> str:
    """Draw one line per worker."""
    lines = []
    for worker, spans in enumerate(timeline.spans):
        first = min(action.stage for action, _, _ in spans)
        line = ""
        for action, start, end in spans:
            kind = action.kind.value if action.stage == first else action.kind.value.lower()
            label = f"{kind}{action.microbatch}"
            line = line.ljust(start * TICK) + label + "─" * ((end - start) * TICK - len(label) - 1) + " "
        lines.append(f"worker {worker}   {line}".rstrip())
    return "\n".join(lines)


def microbatch_requirement(schedule: str) -> str:
    """Describe what a schedule requires of the number of micro-batches."""
    rule = SCHEDULES[schedule]
    three, four = (rule.min_microbatches(rule.stages_per_worker * workers, workers) for workers in (3, 4))
    minimum = {(1, 1): "", (3, 4): "at least one per stage", (6, 8): "at least 2p"}[three, four]
    return " and ".join(filter(None, [minimum, "a multiple of p" if rule.rounds else ""])) or "any number"


def _row(schedule: str) -> list[str]:
    rule, timeline = SCHEDULES[schedule], simulate(schedule, 4, 8)
    stages = f"{rule.stages_per_worker} or more" if rule.any_number_of_stages else f"{rule.stages_per_worker}"
    return [
        f"`{schedule}`",
        f"{timeline.ticks}",
        f"{timeline.bubble:.0%}",
        ", ".join(f"{value:g}" for value in timeline.in_flight),
        stages,
        "in-order or v" if rule.any_placement else rule.placement,
        microbatch_requirement(schedule),
    ]


def schedules_page() -> str:
    """Build the whole page."""
    parts = [HEAD]
    for schedule in SCHEDULES:
        description = textwrap.fill(DESCRIPTIONS[schedule], 120, break_on_hyphens=False)
        picture = f"![{schedule} on four workers](pictures/schedules/{schedule}.svg)"
        text = diagram(simulate(schedule, 2, 4))
        parts.append(f"### {schedule}\n\n{description}\n\n```text\n{text}\n```\n\n{picture}\n")
    parts.append(COMPARISON + "".join(f"| {' | '.join(_row(schedule))} |\n" for schedule in SCHEDULES))
    parts.append(ADVICE)
    rows = "".join(f"| {name} | {ticks:.1f} | {in_flight:g} |\n" for name, ticks, in_flight in unequal_rows())
    parts.append(SEARCHED_ORDERS + rows)
    parts.append(DETAILS)
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(schedules_page(), encoding="utf-8")
