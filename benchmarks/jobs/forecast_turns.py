"""One worker's part of ``forecast_accuracy.py``: measure a model and run the plan, alternating in the same processes.

    load, capture ─► parity ─► memory ─► turn: one worker measures the model's units, both the machine ─► steps
                                          └──────────────── next turn, next worker ◄──────────────────────┘
    steps of a turn   whole model ─ step ─ whole model ─ step ─ whole model …        each worker on its own core
    after all turns   a forecast of each step, for the speed that the cores had around it (paired)
                      a forecast of each turn, for the speed while units were measured, with contention (unpaired)

A core may be a third slower seconds later, independently of other cores. So the measurements behind a forecast and the
steps that it is compared with are spread over the same minute and the same cores, and the speed of both cores is
measured right before and after each step, by running the whole model without the engine. Forecasts use no step time.
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
from verified import verified_runner
from whole_model import WholeModel, WholeTime, with_whole_time

from stagewright.files.atomic import save_text
from stagewright.planner.calibration.calibrate import Calibration, calibrate_from_rounds
from stagewright.planner.calibration.job import Probe, gather_rounds
from stagewright.planner.costs.measure import measure_model
from stagewright.planner.forecast import prepare_plan


def run_job(plan: Any, context: Any, run_folder: Any) -> None:
    """Check parity, then take turns; writes turns.json."""
    settings = json.loads(os.environ["FORECAST_TURNS"])
    runner, batch, parity = verified_runner(plan, context)
    gc.collect()
    gc.freeze()
    optimizer = runner.make_optimizer()

    def step() -> float:
        start = time.perf_counter()
        if not plan.training:  # as the engine times a stream: the pipeline is filled once for several batches
            for _ in runner.stream(batch, plan.steps):
                pass
            return (time.perf_counter() - start) / plan.steps
        runner.part.zero_gradients()
        runner.memory.update()
        result = runner.train_step(batch)
        runner.optimizer_step(optimizer)
        runner.total_loss(result)
        return time.perf_counter() - start

    runner.memory.reset_peak()
    if plan.training:
        with runner.memory.tracking():
            step()
            runner.memory.follow_optimizer(optimizer)
            runner.memory.begin_rows()
            step()
    else:
        with runner.memory.tracking():
            runner.memory.begin_rows("loaded")
        step()
    memory_bytes = runner.memory.report().to_dict()["peak_memory_bytes"]  # before units are measured here
    calibration = Calibration.from_dict(json.loads(Path(settings["calibration"]).read_text()))
    own_plan = replace(plan, devices=(plan.devices[context.rank], *plan.devices[1:]))
    has_peers = plan.mesh.num_workers > 1
    probe = Probe(context) if has_peers else None
    measured, rounds, steps_s, model_times = [], [], [], []
    model = WholeModel(own_plan)

    def barrier() -> None:
        if has_peers:
            dist.barrier()

    def sample_model() -> WholeTime:
        """Time the model on all workers at once; the next step starts on all at once too."""
        barrier()
        seconds = model.sample()
        barrier()
        return seconds

    for turn in range(settings["turns"]):
        if turn % plan.mesh.num_workers == context.rank:
            measured.append(measure_model(own_plan, cache=False, repeats=settings["repeats"]))
            gc.collect()
        if probe is not None:
            dist.barrier()
            probe.round()  # warm up caches and pages
            rounds += [probe.round() for _ in range(settings["rounds"])]
        step()
        model.sample()
        samples, turn_steps_s = [sample_model()], []
        for _ in range(settings["steps"]):
            turn_steps_s.append(step())
            samples.append(sample_model())
        model_times.append(samples)
        steps_s.append(turn_steps_s)
    if has_peers:
        calibration = calibrate_from_rounds(calibration, gather_rounds(rounds))
    times_of_workers = gather_times(model_times) if has_peers else [model_times]
    forecasts = []
    for turn, costs in zip(range(context.rank, settings["turns"], plan.mesh.num_workers), measured, strict=True):
        forecast = make_forecast(plan, costs, replace(calibration, speeds=()))  # each device is measured in its turn
        memory = max(forecast_bytes(worker, plan) for worker in forecast.workers)
        paired = paired_forecasts(plan, costs, calibration, [times[turn] for times in times_of_workers])
        forecasts.append({"turn": turn, "step_s": forecast.step_s, "paired_s": paired, "memory_bytes": memory})
    result = {"equality": parity.to_dict(), "forecasts": forecasts, "steps_s": steps_s, "memory_bytes": memory_bytes}
    folder = run_folder.worker(context.rank).path
    folder.mkdir(parents=True, exist_ok=True)
    save_text(json.dumps(result) + "\n", folder / "turns.json")


def gather_times(model_times: list[list[WholeTime]]) -> list[list[list[WholeTime]]]:
    """Gather the whole-model times of every worker, by turn and moment; all workers have equally many."""
    own_times = torch.tensor(model_times, dtype=torch.float64)
    gathered = [torch.empty_like(own_times) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own_times)
    return [times.tolist() for times in gathered]


def make_forecast(plan: Any, measured: Any, calibration: Calibration) -> Any:
    """Forecast the plan on the calibrated machine."""
    return prepare_plan(plan, measured, calibration.cluster(plan.mesh.num_workers), calibration.overheads).forecast()


def paired_forecasts(
    plan: Any, measured: Any, calibration: Calibration, times_of_workers: Sequence[Sequence[WholeTime]]
) -> list[float]:
    """Forecast the steps of a turn, each as the mean of two: with the speeds right before it, and right after it.

    These speeds include contention, and the slower worker may change from moment to moment, as it does in steps.
    """
    overheads, forecasts_s = replace(calibration.overheads, contention=0.0), []
    for times in zip(*times_of_workers, strict=True):  # of all workers at one moment
        speeds = tuple(sum(times[0]) / sum(worker_times) for worker_times in times)
        machine = replace(calibration, overheads=overheads, speeds=speeds)
        forecasts_s.append(make_forecast(plan, with_whole_time(measured, times[0]), machine).step_s)
    return [statistics.mean(pair) for pair in itertools.pairwise(forecasts_s)]


def forecast_bytes(worker: Any, plan: Any) -> int:
    """Return the peak as the engine measures it: on a CPU own tensors without posted receives, on CUDA everything."""
    on_cuda = plan.devices[0].startswith("cuda")
    return int(worker.memory.peak_bytes if on_cuda else worker.memory.counted_bytes)
