"""Accuracy of memory forecasts: the peak of every worker, forecast from a profile and measured.

    python benchmarks/forecast_memory.py --device cuda:0 --at-once 4

Speeds do not matter here, so the workers of a plan share one device and several plans run at once, each in a separate
process. On a GPU the measured peak is the allocator's; `--device cpu:0` counts the worker's own tensors. All strategies
are covered, including FSDP, inference, split backward passes, and models larger than a worker's memory limit.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

from forecast_accuracy import describe, make_plan
from isolated_runs import chosen_plans, isolated_parser, run_isolated
from record import write_record

BERT = {"model": "bert-minilm", "sequence_length": 64, "batch": 8}
DEIT = {"model": "deit-tiny", "batch": 8}
GPT = {"model": "gpt-layers:6", "sequence_length": 64, "batch": 8}
LARGE = {"model": "gpt-layers:12", "sequence_length": 64, "batch": 8, "memory_bytes": 700 << 20}
GPT2 = {"model": "gpt2", "sequence_length": 256, "batch": 16}
RESNET = {"model": "resnet-50", "image_size": 96, "batch": 16}
MOBILENET = {"model": "mobilenet-v2", "image_size": 96, "batch": 16}
PIPELINE = {"mesh": "pipeline=2", "microbatches": 4}

PLANS: tuple[dict[str, Any], ...] = (
    {**BERT, "mesh": "serial"},
    {**BERT, "mesh": "serial", "microbatches": 4},
    {**BERT, "mesh": "data=2"},
    {**BERT, "mesh": "data=2", "shard": True},
    {**BERT, "mesh": "tensor=2"},
    {**BERT, **PIPELINE},
    {**BERT, "mesh": "pipeline=2", "microbatches": 8, "schedule": "gpipe"},
    {**BERT, **PIPELINE, "training": False},
    {**DEIT, "mesh": "serial"},
    {**DEIT, "mesh": "data=2", "microbatches": 2},
    {**DEIT, **PIPELINE},
    {**DEIT, **PIPELINE, "recompute": "always"},
    {**DEIT, **PIPELINE, "schedule": "interleaved", "stages": 4},
    {**DEIT, **PIPELINE, "schedule": "zbv", "stages": 4},
    {"model": "deit-small", "image_size": 112, "batch": 8, "mesh": "tensor=2"},
    {"model": "deit-small", "batch": 64, **PIPELINE},
    {"model": "deit-small", "batch": 64, **PIPELINE, "precision": "bf16"},
    {**GPT, "mesh": "serial", "recompute": "always"},
    {**GPT, "mesh": "serial", "training": False},
    {**GPT, "mesh": "data=2"},
    {**GPT, "mesh": "data=2", "shard": True},
    {**GPT, "mesh": "data=2", "shard": True, "microbatches": 2},
    {**GPT, **PIPELINE},
    {**GPT, **PIPELINE, "schedule": "interleaved-zero-bubble", "stages": 4},
    {**GPT, **PIPELINE, "schedule": "dualpipev", "stages": 4},
    {**GPT, "mesh": "data=2,pipeline=2", "microbatches": 4},
    {**GPT, "mesh": "data=2,tensor=2"},
    {**LARGE, **PIPELINE},
    {**LARGE, "mesh": "data=2", "shard": True},
    {**GPT2, "mesh": "data=2"},
    {**GPT2, **PIPELINE},
    {**GPT2, **PIPELINE, "recompute": "always"},
    {**GPT2, **PIPELINE, "optimizer": "adamw"},
    {"model": "llama-tiny", "sequence_length": 64, "batch": 8, "mesh": "tensor=2"},
    {**RESNET, "mesh": "serial"},
    {**RESNET, **PIPELINE},
    {**RESNET, **PIPELINE, "training": False},
    {**MOBILENET, "mesh": "serial"},
    {**MOBILENET, "mesh": "data=2"},
    {**MOBILENET, **PIPELINE},
)


def main() -> None:
    parser = isolated_parser(__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", default="")
    options = parser.parse_args()
    chosen = chosen_plans(options, PLANS)
    rows: list[dict[str, Any]] = []

    def add_row(settings: dict[str, Any], result: dict[str, Any]) -> None:
        rows.append({"plan": describe_plan(settings), "settings": settings, **result})
        print(describe_row(rows[-1]), file=sys.stderr, flush=True)
        if options.output:  # a benchmark that is stopped early leaves its results
            write_record(options.output, summary(rows, chosen))

    run_isolated(options, PLANS, forecast_and_measure, add_row)
    data = summary(rows, chosen)
    print(json.dumps(data, indent=2) if options.json else f"worst error {data['worst_memory_error']:.1%}")
    sys.exit(1 if any("error" in row for row in rows) else 0)


def forecast_and_measure(settings: dict[str, Any], device: str) -> dict[str, Any]:
    """Forecast and measure the peak memory of each worker."""
    from stagewright.cluster.cluster import Cluster, DeviceGroup, Link, Links
    from stagewright.engine.jobs.compare import run_plan
    from stagewright.planner.costs.measure import measure_model
    from stagewright.planner.forecast import prepare_plan
    from stagewright.spec.plan import OptimizerSpec

    fields = dict(settings)
    if "optimizer" in fields:
        fields["optimizer"] = OptimizerSpec(name=fields["optimizer"])
    plan = make_plan({**fields, "steps": 2, "warmup": 1}, (device,) * 8)
    on_gpu = device.startswith("cuda")
    measured = measure_model(plan, cache=False, repeats=1)
    # Link speeds do not affect memory: stages run in the order of their schedule.
    link = Link(bandwidth_bytes_per_s=1e11, latency_s=1e-5)
    group = DeviceGroup(kind="cuda" if on_gpu else "cpu", count=plan.mesh.num_workers)
    forecast = prepare_plan(plan, measured, Cluster(devices=(group,), links=Links(intra_host=link))).forecast()
    memories = [worker.memory for worker in forecast.workers]
    forecast_bytes = [memory.peak_bytes if on_gpu else memory.counted_bytes for memory in memories]
    with tempfile.TemporaryDirectory() as root:
        row = run_plan(plan, root, hang_s=60).to_dict()
    return {
        "equal": row["equality"]["equal"],
        "forecast_memory_bytes": max(forecast_bytes),
        "measured_memory_bytes": max(row["peak_memory_bytes"]),
        # One per pipeline rank; data and tensor peers are alike.
        "forecast_bytes": forecast_bytes,
        "measured_bytes": row["peak_memory_bytes"],
    }


def summary(rows: list[dict[str, Any]], order: Any) -> dict[str, Any]:
    """Return the rows in the order of the plans, and the worst error."""
    ordered = sorted(rows, key=lambda row: list(order).index(row["settings"]))
    errors = [row["forecast_memory_bytes"] / row["measured_memory_bytes"] - 1 for row in ordered if "error" not in row]
    return {
        "plans": [{name: value for name, value in row.items() if name != "settings"} for row in ordered],
        "worst_memory_error": max(map(abs, errors), default=0.0),
    }


def describe_plan(settings: dict[str, Any]) -> str:
    words = [describe(settings)]
    words += [str(settings[name]) for name in ("dtype", "optimizer") if name in settings]
    words += [f"{settings['memory_bytes'] >> 20} MiB allowed"] if "memory_bytes" in settings else []
    return ", ".join(words)


def describe_row(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['plan']}: FAILED {row['error']}"
    forecast, measured = row["forecast_memory_bytes"], row["measured_memory_bytes"]
    text = f"{row['plan']:70} {forecast / 2**20:8.1f} MiB {measured / 2**20:8.1f} MiB {forecast / measured - 1:+6.1%}"
    return text + ", FAILED the parity check" * (not row["equal"])


if __name__ == "__main__":
    main()
