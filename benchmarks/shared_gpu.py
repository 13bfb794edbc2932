"""Parity check over NCCL of plans for several GPUs, with workers that share one GPU.

    python benchmarks/shared_gpu.py --at-once 4

Workers of one plan share a GPU (each is a separate machine for NCCL), so speeds mean nothing; loss, outputs, gradients
and buffers are compared. Several plans run at once, because most of a run is start-up. `--device cpu:0` tests the
benchmark itself.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

from forecast_accuracy import make_plan
from isolated_runs import isolated_parser, run_isolated

GPT = {"model": "gpt-layers:4", "sequence_length": 32, "batch": 8}
VIT = {"model": "digits-vit", "batch": 8}
NET = {"model": "mobilenet-v2", "image_size": 64, "batch": 16}
LARGE = {"model": "gpt-layers:4", "sequence_length": 32, "batch": 8, "memory_bytes": 240 << 20}
SCHEDULES = {"1f1b": 2, "gpipe": 2, "interleaved": 4, "looped-bfs": 4, "interleaved-zero-bubble": 4}
SCHEDULES |= {"zbv": 4, "dualpipev": 4}
LLAMA = {"model": "llama-tiny", "sequence_length": 32, "batch": 8}

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
    {**LLAMA, "mesh": "tensor=2"},
    {"model": "llama-tiny", "sequence_length": 32, "batch": 7, "mesh": "data=2,pipeline=2", "microbatches": 3},
    # Larger than a worker's memory limit: parameters stay on the host until each worker has its part.
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
    {**GPT, "mesh": "data=2", "shard": True, "recompute": "always"},
    {**GPT, "mesh": "data=2", "shard": True, "microbatches": 3, "batch": 7},
    {**GPT, "mesh": "tensor=2", "training": False},
    {**NET, "mesh": "data=2", "training": False},
    {**GPT, "mesh": "pipeline=2", "microbatches": 4, "precision": "bf16"},
    {**NET, "mesh": "serial", "cuda_graphs": True},
    *(
        {**LLAMA, "mesh": "pipeline=2", "microbatches": 4, "cuda_graphs": True, **options}
        for options in ({}, {"schedule": "zbv", "stages": 4}, {"compile": "stages"}, {"training": False})
    ),
)


def main() -> None:
    verdicts: list[bool] = []

    def show(settings: dict[str, Any], parity: dict[str, Any]) -> None:
        verdicts.append(bool(parity.get("equal")))
        text = ", ".join(f"{name} {value}" for name, value in settings.items())
        if "error" in parity:
            print(f"FAILED  {text}: {parity['error']}", flush=True)
            return
        verdict = "ok     " if parity["equal"] else "DIFFERS"
        print(f"{verdict} {text}: gradients {parity['gradients']:.1e}, outputs {parity['outputs']:.1e}", flush=True)

    run_isolated(isolated_parser(__doc__).parse_args(), PLANS, check_plan, show)
    print(f"{sum(verdicts)} of {len(verdicts)} plans pass the parity check")
    sys.exit(0 if all(verdicts) else 1)


def check_plan(settings: dict[str, Any], device: str) -> dict[str, Any]:
    """Run one plan whose workers share a device, and return its parity report."""
    from stagewright.engine.jobs.compare import run_plan
    from stagewright.errors import StagewrightError

    with tempfile.TemporaryDirectory() as root:
        try:
            plan = make_plan({**settings, "steps": 2, "warmup": 1}, (device,) * 8)
            return run_plan(plan, root, hang_s=60).to_dict()["equality"]
        except StagewrightError as error:
            return {"error": str(error)}


if __name__ == "__main__":
    main()
