"""One worker's part of ``forecast_accuracy.py``: measure a model and run the plan, in turns, in the same processes.

    load, capture ─► prove ─► memory counted ─► turn: one worker measures the model's units, both the machine ─► steps
                                                 └──────────────── the next turn, the next worker ◄────────────┘
                                                after all turns: a forecast of each turn's model on that machine

A core may be a third slower some seconds later, and another core not. So what a forecast is made of and the steps that
it is compared with are spread over the same minute and over the same cores. Forecasts see no step.
"""

from __future__ import annotations

import gc
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from proven import proven_replica

from stagewright.cluster.atomic_file import save_text
from stagewright.engine.job import make_optimizer
from stagewright.planner.calibrate import Calibration, with_rounds
from stagewright.planner.calibration_job import Probe, both
from stagewright.planner.forecasting import prepare
from stagewright.planner.measure import measure_model


def run_job(plan: Any, context: Any, run_folder: Any) -> None:
    """Prove the plan, then turns; writes turns.json."""
    settings = json.loads(os.environ["FORECAST_TURNS"])
    replica, batch, equality = proven_replica(plan, context)
    gc.collect()
    gc.freeze()
    optimizer = make_optimizer(plan.optimizer, [one for one in replica.module.parameters() if one.requires_grad])

    def step() -> float:
        start = time.perf_counter()
        replica.zero_gradients()
        replica.memory.update()
        outcome = replica.train_step(batch)
        replica.change_parameters(optimizer)
        replica.total_loss(outcome)
        return time.perf_counter() - start

    replica.memory.reset_peak()
    with replica.tracked():
        step()
        replica.memory.follow_optimizer(optimizer)
        replica.memory.begin_rows()
        step()
    memory_bytes = replica.memory.report().to_dict()["peak_memory_bytes"]  # before others are measured here
    calibration = Calibration.from_dict(json.loads(Path(settings["calibration"]).read_text()))
    own = replace(plan, devices=(plan.devices[context.rank], *plan.devices[1:]))
    several = plan.mesh.num_workers > 1
    probe = Probe(context) if several else None
    measured, rounds, steps_s = [], [], []
    for turn in range(settings["turns"]):
        if turn % plan.mesh.num_workers == context.rank:
            measured.append(measure_model(own, cache=False, repeats=settings["repeats"]))
            gc.collect()
        if probe is not None:
            dist.barrier()
            probe.round()  # caches and pages after somebody else's work
            rounds += [probe.round() for _ in range(settings["rounds"])]
        step()
        steps_s.append([step() for _ in range(settings["steps"])])
    if several:
        calibration = with_rounds(calibration, both(rounds))
    calibration = replace(calibration, speeds=())  # every device is measured in its turn
    cluster = calibration.cluster(plan.mesh.num_workers)
    forecasts = []
    for one in measured:
        found = prepare(plan, one, cluster, calibration.terms).forecast()
        memory = max(held(worker, plan) for worker in found.workers)
        forecasts.append({"step_s": found.step_s, "memory_bytes": memory})
    result = {
        "equality": equality.to_dict(),
        "forecasts": forecasts,
        "steps_s": steps_s,
        "memory_bytes": memory_bytes,
    }
    folder = run_folder.worker(context.rank).path
    folder.mkdir(parents=True, exist_ok=True)
    save_text(json.dumps(result) + "\n", folder / "turns.json")


def held(worker: Any, plan: Any) -> int:
    """As the engine measures it: a CPU worker counts its own tensors, without posted receives; CUDA's allocator all."""
    on_cuda = plan.devices[0].startswith("cuda")
    return int(worker.memory.peak_bytes if on_cuda else worker.memory.counted_bytes)
