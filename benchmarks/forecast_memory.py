"""How true forecasts of memory are: the peak of every worker, forecast from a profile and then measured.

    python benchmarks/forecast_memory.py --device cuda:0 --at-once 4

Speeds say nothing here, so the workers of a plan share one device and some plans run at once, each in a process of its
own. On a GPU the measured peak is its allocator's; `--device cpu:0` counts the worker's own tensors. All strategies are
there, among them shards, inference, backward passes in halves, and models larger than a worker is allowed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

from apart import apart_parser, chosen_plans, run_apart
from forecast_accuracy import describe, make_plan
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
    {"model": "deit-small", "batch": 64, **PIPELINE, "dtype": "bfloat16"},
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
    parser = apart_parser(__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", default="")
    options = parser.parse_args()
    chosen = chosen_plans(options, PLANS)
    rows: list[dict[str, Any]] = []

    def take(about: dict[str, Any], found: dict[str, Any]) -> None:
        rows.append({"plan": describe_plan(about), "about": about, **found})
        print(describe_row(rows[-1]), file=sys.stderr, flush=True)
        if options.output:  # a benchmark that is ended early leaves what it has
            write_record(options.output, summary(rows, chosen))

    run_apart(options, PLANS, forecast_and_measure, take)
    found = summary(rows, chosen)
    print(json.dumps(found, indent=2) if options.json else f"at most {found['worst_memory_error']:.1%} off")
    sys.exit(1 if any("error" in row for row in rows) else 0)


def forecast_and_measure(about: dict[str, Any], device: str) -> dict[str, Any]:
    """The forecast peak of each worker, then what they measure."""
    from stagewright.cluster.cluster import Cluster, DeviceGroup, Link, Links
    from stagewright.engine.jobs.compare import run_plan
    from stagewright.planner.costs.measure import measure_model
    from stagewright.planner.forecast import prepare_plan
    from stagewright.spec.plan import OptimizerSpec

    given = dict(about)
    if "optimizer" in given:
        given["optimizer"] = OptimizerSpec(name=given["optimizer"])
    plan = make_plan({**given, "steps": 2, "warmup": 1}, (device,) * 8)
    on_gpu = device.startswith("cuda")
    measured = measure_model(plan, cache=False, repeats=1)
    # How fast links are moves no byte: stages run in the order of their schedule.
    link = Link(bandwidth_bytes_per_s=1e11, latency_s=1e-5)
    group = DeviceGroup(kind="cuda" if on_gpu else "cpu", count=plan.mesh.num_workers)
    forecast = prepare_plan(plan, measured, Cluster(devices=(group,), links=Links(intra_host=link))).forecast()
    along = [one.memory.peak_bytes if on_gpu else one.memory.counted_bytes for one in forecast.workers]
    with tempfile.TemporaryDirectory() as root:
        row = run_plan(plan, root, hang_s=60).to_dict()
    return {
        "equal": row["equality"]["equal"],
        "forecast_memory_bytes": max(along),
        "measured_memory_bytes": max(row["peak_memory_bytes"]),
        # Along the pipeline; data and tensor peers are alike.
        "forecast_bytes": along,
        "measured_bytes": row["peak_memory_bytes"],
    }


def summary(rows: list[dict[str, Any]], order: Any) -> dict[str, Any]:
    """What is there, in the order of the plans."""
    placed = sorted(rows, key=lambda row: list(order).index(row["about"]))
    errors = [row["forecast_memory_bytes"] / row["measured_memory_bytes"] - 1 for row in placed if "error" not in row]
    return {
        "plans": [{name: value for name, value in row.items() if name != "about"} for row in placed],
        "worst_memory_error": max(map(abs, errors), default=0.0),
    }


def describe_plan(about: dict[str, Any]) -> str:
    words = [describe(about)]
    words += [str(about[name]) for name in ("dtype", "optimizer") if name in about]
    words += [f"{about['memory_bytes'] >> 20} MiB allowed"] if "memory_bytes" in about else []
    return ", ".join(words)


def describe_row(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['plan']}: FAILED {row['error']}"
    forecast, measured = row["forecast_memory_bytes"], row["measured_memory_bytes"]
    text = f"{row['plan']:70} {forecast / 2**20:8.1f} MiB {measured / 2**20:8.1f} MiB {forecast / measured - 1:+6.1%}"
    return text + ", NOT equal to serial" * (not row["equal"])


if __name__ == "__main__":
    main()
