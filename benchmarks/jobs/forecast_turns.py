"""One worker's part of ``forecast_accuracy.py``: measure a model and run the plan, in turns, in the same processes.

    load, capture ─► prove ─► memory counted ─► turn: one worker measures the model's units, both the machine ─► steps
                                                 └──────────────── the next turn, the next worker ◄────────────┘
    steps of a turn   whole model ─ step ─ whole model ─ step ─ whole model …        each worker on its own core
    after all turns   a forecast of each step, with cores as fast as the whole model was around it
                      a forecast of each turn, with cores as fast as when units were measured, and their crowding

A core may be a third slower some seconds later, and another core not. So what a forecast is made of and the steps that
it is compared with are spread over the same minute and over the same cores, and each step has a look at both cores'
speed right before and after it: its model, in one piece and without the engine. Forecasts see no step.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from proven import proven_replica
from whole_model import WholeModel, WholeTime, with_whole

from stagewright.engine.parallel.optimizer import make_optimizer
from stagewright.files.atomic import save_text
from stagewright.planner.calibration.calibrate import Calibration, calibrate_from_rounds
from stagewright.planner.calibration.job import Probe, gather_rounds
from stagewright.planner.costs.measure import measure_model
from stagewright.planner.forecast import prepare_plan


def run_job(plan: Any, context: Any, run_folder: Any) -> None:
    """Prove the plan, then turns; writes turns.json."""
    settings = json.loads(os.environ["FORECAST_TURNS"])
    runner, batch, equality = proven_replica(plan, context)
    gc.collect()
    gc.freeze()
    optimizer = make_optimizer(plan.optimizer, [one for one in runner.part.module.parameters() if one.requires_grad])

    def step() -> float:
        start = time.perf_counter()
        if not plan.training:  # a stream, as the engine times it: its pipeline is filled once for some batches
            for _ in runner.stream(batch, plan.steps):
                pass
            return (time.perf_counter() - start) / plan.steps
        runner.part.zero_gradients()
        runner.memory.update()
        outcome = runner.train_step(batch)
        runner.optimizer_step(optimizer)
        runner.total_loss(outcome)
        return time.perf_counter() - start

    runner.memory.reset_peak()
    if plan.training:
        with runner.track_memory():
            step()
            runner.memory.follow_optimizer(optimizer)
            runner.memory.begin_rows()
            step()
    else:
        with runner.memory.tracking():
            runner.memory.begin_rows("loaded")
        step()
    memory_bytes = runner.memory.report().to_dict()["peak_memory_bytes"]  # before others are measured here
    calibration = Calibration.from_dict(json.loads(Path(settings["calibration"]).read_text()))
    own = replace(plan, devices=(plan.devices[context.rank], *plan.devices[1:]))
    several = plan.mesh.num_workers > 1
    probe = Probe(context) if several else None
    measured, rounds, steps_s, wholes = [], [], [], []
    whole = WholeModel(own)

    def together() -> None:
        if several:
            dist.barrier()

    def sampled() -> WholeTime:
        """On all workers at once; the step after it begins on all at once, too."""
        together()
        taken = whole.sample()
        together()
        return taken

    for turn in range(settings["turns"]):
        if turn % plan.mesh.num_workers == context.rank:
            measured.append(measure_model(own, cache=False, repeats=settings["repeats"]))
            gc.collect()
        if probe is not None:
            dist.barrier()
            probe.round()  # caches and pages after somebody else's work
            rounds += [probe.round() for _ in range(settings["rounds"])]
        step()
        whole.sample()
        around, taken = [sampled()], []
        for _ in range(settings["steps"]):
            taken.append(step())
            around.append(sampled())
        wholes.append(around)
        steps_s.append(taken)
    if several:
        calibration = calibrate_from_rounds(calibration, gather_rounds(rounds))
    everyone = of_all(wholes) if several else [wholes]
    forecasts = []
    for turn, one in zip(range(context.rank, settings["turns"], plan.mesh.num_workers), measured, strict=True):
        forecast = forecast_of(plan, one, replace(calibration, speeds=()))  # every device is measured in its turn
        memory = max(held(worker, plan) for worker in forecast.workers)
        paired = paired_forecasts(plan, one, calibration, [wholes[turn] for wholes in everyone])
        forecasts.append({"turn": turn, "step_s": forecast.step_s, "paired_s": paired, "memory_bytes": memory})
    result = {
        "equality": equality.to_dict(),
        "forecasts": forecasts,
        "steps_s": steps_s,
        "memory_bytes": memory_bytes,
    }
    folder = run_folder.worker(context.rank).path
    folder.mkdir(parents=True, exist_ok=True)
    save_text(json.dumps(result) + "\n", folder / "turns.json")


def of_all(wholes: list[list[WholeTime]]) -> list[list[list[WholeTime]]]:
    """Every worker's times of its whole model, by turn and moment; all have as many."""
    own = torch.tensor(wholes, dtype=torch.float64)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [one.tolist() for one in found]


def forecast_of(plan: Any, measured: Any, calibration: Calibration) -> Any:
    """The forecast on the machine as it was measured."""
    return prepare_plan(plan, measured, calibration.cluster(plan.mesh.num_workers), calibration.overheads).forecast()


def paired_forecasts(
    plan: Any, measured: Any, calibration: Calibration, wholes: Sequence[Sequence[WholeTime]]
) -> list[float]:
    """A turn's steps, each the mean of two forecasts: with every worker as fast as right before it, and as after it.

    Their crowding is in that; which worker is the slower one may change from moment to moment, as it does in steps.
    """
    terms, moments = replace(calibration.overheads, contention=0.0), []
    for times in zip(*wholes, strict=True):  # of all workers at one moment
        speeds = tuple(sum(times[0]) / sum(one) for one in times)
        at_once = replace(calibration, overheads=terms, speeds=speeds)
        moments.append(forecast_of(plan, with_whole(measured, times[0]), at_once).step_s)
    return [statistics.mean(pair) for pair in itertools.pairwise(moments)]


def held(worker: Any, plan: Any) -> int:
    """As the engine measures it: a CPU worker counts its own tensors, without posted receives; CUDA's allocator all."""
    on_cuda = plan.devices[0].startswith("cuda")
    return int(worker.memory.peak_bytes if on_cuda else worker.memory.counted_bytes)
