"""One worker of a plan whose model is larger than the memory that the worker may use; see test_limited_memory.py.

    python limited_jobs.py FOLDER RANK MESH CUTS TRAINING BASELINE

Prints the choice of the baseline and the parity report as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch
import torch.distributed as dist

from stagewright.cluster.device import Device, keep_freed_memory, usable_cores
from stagewright.engine.parallel.model import capture_for, load_model
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.engine.parity.check import baseline_of, check_parity
from stagewright.engine.worker.context import make_context
from stagewright.machine.host_memory import available_bytes
from stagewright.spec.host_memory_check import choose_baseline
from stagewright.spec.plan import Mesh, ModelSpec, OptimizerSpec, Plan
from stagewright.zoo.model import Batch


def main(folder: str, rank: int, mesh: str, cuts: str, training: bool, baseline: str) -> None:
    """Check one worker's part of the plan for parity, as ``stagewright compare`` does."""
    torch.set_num_threads(1)
    keep_freed_memory()
    device = Device.parse(f"cpu:{min(usable_cores())}")
    num_workers = Mesh.parse(mesh).num_workers
    plan = Plan(
        model=ModelSpec(name=f"hf:{folder}/model", sequence_length=4),
        mesh=Mesh.parse(mesh),
        cuts=tuple(filter(None, cuts.split(","))),
        batch=num_workers,
        microbatches=num_workers,
        devices=(str(device),) * num_workers,
        training=training,
        optimizer=OptimizerSpec(name="sgd", learning_rate=0.01, momentum=0.0),
        baseline=baseline,
    )
    available = available_bytes()
    plan = choose_baseline(plan)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{mesh}-store", rank=rank, world_size=num_workers)
    context = make_context(plan.mesh, rank, device)
    model = load_model(plan, context, hollow=plan.baseline == "streamed")
    graph = capture_for(plan, model)
    spool = Path(folder, "spool")
    reference = baseline_of(plan, model, graph, context, folder=spool) if rank == 0 else None
    runner = StepRunner(plan, model, context, graph)
    batch = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
    report = check_parity(runner, batch, reference, folder=spool / f"worker-{rank}")
    held = sum(parameter.nbytes for parameter in runner.part.module.parameters())
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    row = {"baseline": plan.baseline, "available": available, "held": held, "peak": peak}
    sys.stdout.write(json.dumps(row | {"report": dataclasses.asdict(report)}) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    name, position, layout, names, trains, choice = sys.argv[1:]
    main(name, int(position), layout, names, trains == "True", choice)
