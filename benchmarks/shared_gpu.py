"""Plans for several GPUs, proven by workers that share one: each equal to serial, over NCCL?

    python benchmarks/shared_gpu.py --at-once 4

Workers of one plan share a GPU (each is a machine of its own for NCCL), so speeds say nothing; loss, results, gradients
and buffers do. Some plans run at once, since most of a run is starting. `--device cpu:0` tries the benchmark itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from stagewright.cluster.device import has_gpu

GPT = {"model": "gpt-layers:4", "sequence_length": 32, "batch": 8}
VIT = {"model": "digits-vit", "batch": 8}
NET = {"model": "mobilenet-v2", "image_size": 64, "batch": 16}
LARGE = {"model": "gpt-layers:4", "sequence_length": 32, "batch": 8, "memory_bytes": 240 << 20}
SCHEDULES = {"1f1b": 2, "gpipe": 2, "interleaved": 4, "looped-bfs": 4, "interleaved-zero-bubble": 4}
SCHEDULES |= {"zbv": 4, "dualpipev": 4}

PLANS: tuple[dict[str, Any], ...] = (
    *(
        {**GPT, "mesh": "pipeline=2", "microbatches": 4, "schedule": name, "stages": stages}
        for name, stages in SCHEDULES.items()
    ),
    {**GPT, "mesh": "serial"},
    {**GPT, "mesh": "data=2"},
    {**GPT, "mesh": "data=2", "shard": True},
    {**GPT, "mesh": "tensor=2"},
    {**VIT, "mesh": "pipeline=3", "microbatches": 4},
    {**VIT, "mesh": "pipeline=4", "microbatches": 8},
    {**GPT, "mesh": "pipeline=3", "microbatches": 6, "schedule": "zbv", "stages": 6},
    {**VIT, "mesh": "data=3", "batch": 9},
    {**VIT, "mesh": "data=2,pipeline=2", "microbatches": 4},
    {**GPT, "mesh": "data=2,pipeline=2", "microbatches": 4, "clip": 0.1},
    {**GPT, "mesh": "tensor=2,pipeline=2", "microbatches": 4},
    {**VIT, "mesh": "data=2,tensor=2"},
    {**GPT, "mesh": "data=2,tensor=2,pipeline=2", "microbatches": 2},
    {**VIT, "mesh": "pipeline=2", "microbatches": 4, "codec": "hadamard4"},
    {**GPT, "mesh": "pipeline=2", "microbatches": 4, "recompute": "always"},
    {**GPT, "mesh": "pipeline=2", "microbatches": 4, "recompute": "always", "schedule": "zbv", "stages": 4},
    {**GPT, "mesh": "pipeline=2", "microbatches": 4, "training": False},
    {**GPT, "mesh": "pipeline=4", "microbatches": 8, "training": False},
    {**GPT, "mesh": "pipeline=2", "microbatches": 4, "training": False, "schedule": "zbv", "stages": 4},
    {**NET, "mesh": "data=2"},
    {**NET, "mesh": "pipeline=2", "microbatches": 4},
    {"model": "bert-minilm", "sequence_length": 32, "batch": 8, "mesh": "pipeline=3", "microbatches": 4},
    {"model": "llama-tiny", "sequence_length": 32, "batch": 8, "mesh": "tensor=2"},
    {"model": "llama-tiny", "sequence_length": 32, "batch": 7, "mesh": "data=2,pipeline=2", "microbatches": 3},
    # Larger than the memory that a worker is allowed: parameters stay on the host until each worker has its part.
    {**LARGE, "mesh": "pipeline=2", "microbatches": 4},
    {**LARGE, "mesh": "pipeline=2", "microbatches": 4, "schedule": "zbv", "stages": 4, "recompute": "always"},
    {**LARGE, "mesh": "pipeline=2", "microbatches": 4, "codec": "hadamard4"},
    {**LARGE, "mesh": "pipeline=2", "microbatches": 4, "training": False, "memory_bytes": 100 << 20},
    {**LARGE, "mesh": "data=2", "shard": True},
    {**LARGE, "mesh": "tensor=2"},
    {
        "model": "resnet-50",
        "image_size": 64,
        "batch": 8,
        "mesh": "pipeline=2",
        "microbatches": 4,
        "memory_bytes": 360 << 20,
    },
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--at-once", type=int, default=4, help="plans that run at the same time")
    parser.add_argument("--only", default="", help="numbers of plans with commas, from 0")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(prove(json.loads(options.one), options.device)))
        return
    if options.device.startswith("cuda") and not has_gpu():
        print(f"left out: {options.device} is asked for, and there is no GPU here; --device cpu:0 tries it on a core")
        return
    chosen = [PLANS[int(one)] for one in options.only.split(",")] if options.only else PLANS
    with ThreadPoolExecutor(options.at_once) as pool:
        found = list(pool.map(lambda about: show(about, options.device), chosen))
    print(f"{sum(found)} of {len(found)} plans are equal to serial")
    sys.exit(0 if all(found) else 1)


def show(about: dict[str, Any], device: str) -> bool:
    """Run a plan in a process of its own and print what came of it."""
    command = [sys.executable, __file__, "--device", device, "--one", json.dumps(about)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = run.stdout.strip().splitlines()
    found = json.loads(lines[-1]) if lines and not run.returncode else {"error": run.stderr[-1000:]}
    text = ", ".join(f"{name} {value}" for name, value in about.items())
    if "error" in found:
        print(f"FAILED  {text}: {found['error']}", flush=True)
    else:
        verdict = "equal  " if found["equal"] else "DIFFERS"
        print(f"{verdict} {text}: gradients {found['gradients']:.1e}, results {found['outputs']:.1e}", flush=True)
    return bool(found.get("equal"))


def prove(about: dict[str, Any], device: str) -> dict[str, Any]:
    """The proof of one plan whose workers share a device."""
    from stagewright.engine.compare import run_plan
    from stagewright.errors import StagewrightError
    from stagewright.plan.value import Mesh, ModelSpec, Plan

    rest = dict(about)
    options = {name: rest.pop(name) for name in ("sequence_length", "image_size") if name in rest}
    model, mesh = ModelSpec(name=rest.pop("model"), **options), Mesh.parse(rest.pop("mesh"))
    plan = Plan(model=model, mesh=mesh, devices=(device,) * mesh.num_workers, steps=2, warmup=1, **rest)
    with tempfile.TemporaryDirectory() as root:
        try:
            return dict(run_plan(plan, root, hang_s=60)["equality"])
        except StagewrightError as error:
            return {"error": str(error)}


if __name__ == "__main__":
    main()
