"""One worker's part of ``trace_overhead.py``: alternate one recorded step and two that are not recorded."""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from stagewright.engine.parallel.model import capture_for, load_model
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.engine.worker.recorder import recorder
from stagewright.zoo.model import Batch


def run_job(plan: Any, context: Any, run_folder: Any) -> None:
    model = load_model(plan, context)
    batch = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
    runner = StepRunner(plan, model, context, capture_for(plan, model))
    optimizer = runner.make_optimizer()

    def step() -> None:
        runner.part.zero_gradients()
        result = runner.train_step(batch)
        runner.optimizer_step(optimizer)
        runner.total_loss(result)

    def timed(*, recorded: bool) -> float:
        dist.barrier()
        start = time.perf_counter()
        with recorder.step(0) if recorded else nullcontext():  # outside a recorded step nothing is recorded
            step()
        return time.perf_counter() - start

    recorder.open(context.torch_device, most_steps=50)
    for _ in range(5):
        timed(recorded=True)
    events = len(recorder.rows()) // 5
    gc.collect()
    gc.freeze()
    kinds = {"with": True, "without": False, "again": False}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    orders = [("with", "without", "again"), ("again", "with", "without"), ("without", "again", "with")]
    for number in range(int(os.environ["TRACE_PAIRS"])):
        for name in orders[number % 3]:
            seconds[name].append(timed(recorded=kinds[name]))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    result = {
        "events": events,
        "with_s": medians["with"],
        "without_s": medians["without"],
        "overhead": medians["with"] / statistics.median(seconds["without"] + seconds["again"]) - 1,
        "by_chance": medians["again"] / medians["without"] - 1,
        "event_s": event_s(),
        "seconds": seconds,
    }
    folder = run_folder.worker(context.rank).path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pairs.json").write_text(json.dumps(result))


def event_s(repeats: int = 100_000) -> float:
    """Return the time to record one event."""
    recorder.open()
    with recorder.step(0):
        start = time.perf_counter()
        for _ in range(repeats):
            begun = recorder.now()
            recorder.add("forward", begun)
        return (time.perf_counter() - start) / repeats
