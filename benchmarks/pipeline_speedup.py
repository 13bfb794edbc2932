"""Speed-up of pipeline, data or tensor parallelism over the single-device baseline on pinned cores or shares of a GPU.

    python benchmarks/pipeline_speedup.py --model deit-small --stages 2,3,4,6
    python benchmarks/pipeline_speedup.py --model bert-minilm --stages 2 --no-stock
    python benchmarks/pipeline_speedup.py --model mobilenet-v2 --axis data --microbatches 1 --microbatch-size 16
    python benchmarks/pipeline_speedup.py --model bert-minilm --axis tensor --microbatches 1 --microbatch-size 16
    python benchmarks/pipeline_speedup.py --model deit-base --stages 2,3,4 --split blocks --devices cuda:0/8,cuda:0/8,…

Every figure is a ratio within one round of one run: serial (the user's model on one of the pipeline's cores),
Stagewright's pipeline and stock torch.distributed.pipelining with one core per stage and the same micro-batches, one
after the other. The plan is first verified against the baseline; printed is the median over the rounds, with the lowest
and the highest. Neighboring cores slow each other down, so serial also runs on all of them at once, and the share of
the bound is also given relative to that. Where other programs slow cores down for seconds, compare the fastest of many
short rounds (`--rounds 12 --stream 24 --serial 3`).
Inference is one stream of `--stream` micro-batches per stage (torch: one forward-only step with as many); training is
one step of 1F1B, with SGD. `--split parameters` cuts by equal parameters instead; stock torch with that split is always
among the competitors if it differs. Late is the share of a kind's time beyond its median. The breakdown of each
worker's step is in `parts` (see `step_parts`), the counters of its threads in `threads` (`jobs/thread_counters.py`);
both are means over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from record import write_record
from step_parts import COMPUTING, step_parts

JOBS = Path(__file__).resolve().parent / "jobs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit-small")
    parser.add_argument("--stages", default="2", help="numbers of stages (or workers on another axis), comma-separated")
    parser.add_argument("--axis", default="pipeline", choices=("pipeline", "data", "tensor"))
    parser.add_argument("--microbatches", type=int, default=24)
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--stream", type=int, default=48, help="micro-batches per stage in an inference stream")
    parser.add_argument("--serial", type=int, default=12, help="maximum number of micro-batches of serial per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", default="inference,training")
    parser.add_argument("--sequence-parallel", action="store_true", help="with --axis tensor: divide norms and dropout")
    parser.add_argument("--split", default="optimal")
    parser.add_argument("--units", default="auto")
    parser.add_argument("--image-size", type=int, default=None)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--no-stock", action="store_true", help="skip stock torch")
    parser.add_argument("--no-parameters", action="store_true", help="skip stock torch cut by equal parameters")
    parser.add_argument("--peers", default="", help="torchgpipe, prepare_pippy (the extra `peers`), comma-separated")
    parser.add_argument("--output", default="pipeline_speedup.json")
    parser.add_argument("--devices", default="", help="comma-separated; default: the machine's first")
    parser.add_argument("--cuts", default="", help="unit names, comma-separated: cut there, without a profile")
    options = parser.parse_args()
    sys.path.insert(0, str(JOBS))  # workers are forked from this process and import their job from here
    from stagewright.spec.plan import Mesh, ModelSpec, Plan

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as root:
        for mode in options.modes.split(","):
            base = Plan(
                model=ModelSpec(name=options.model, image_size=options.image_size),
                batch=options.microbatches * options.microbatch_size,
                microbatches=options.microbatches,
                units=options.units,
                split=options.split,
                cuts=tuple(filter(None, options.cuts.split(","))),
                schedule=options.schedule,
                precision=options.precision,
                sequence_parallel=options.sequence_parallel,
                training=mode == "training",
            )
            for count in map(int, options.stages.split(",")):
                devices = tuple(filter(None, options.devices.split(",")))[:count]
                row = measure(replace(base, mesh=Mesh(**{options.axis: count}), devices=devices), options, root)
                rows.append(row)
                print(describe(row), flush=True)
                write_record(options.output, {"rows": rows})


def measure(plan: Any, options: argparse.Namespace, root: str) -> dict[str, Any]:
    """Measure one row: a plan, serial and stock torch."""
    from stagewright.engine.launch.launcher import launch
    from stagewright.engine.parallel.resolve import resolve_plan
    from stagewright.runs.run_folder import RunFolder
    from stagewright.trace.read import read_trace

    plan = resolve_plan(plan)
    num_stages = plan.num_stages
    num_workers = plan.mesh.num_workers
    repeats = max(1, -(-options.stream * num_stages // plan.microbatches))
    settings = {"stream": repeats * plan.microbatches, "rounds": options.rounds}
    with_stock = not options.no_stock and options.axis == "pipeline"
    by_parameters = with_stock and not options.no_parameters
    equal_parameters = resolve_plan(replace(plan, split="parameters", cuts=())).cuts if by_parameters else ()
    settings |= {
        "stock": with_stock,
        "parameters": equal_parameters if equal_parameters != plan.cuts else (),
        "serial": options.serial,
        "peers": options.peers.split(","),
    }
    os.environ["PIPELINE_ROUNDS"] = json.dumps(settings)
    folder = RunFolder.create(root, plan)
    launch(plan, folder, job="pipeline_rounds:run_job")
    workers = [
        json.loads((folder.worker(rank).path / "rounds.json").read_text()) for rank in range(plan.mesh.num_workers)
    ]
    equal = workers[0]["equality"]["equal"]
    count = workers[0]["count"]
    slowest = [
        {name: max(worker["rounds"][number][name] for worker in workers) for name in workers[0]["rounds"][number]}
        for number in range(options.rounds)
    ]
    parts = step_parts(read_trace(folder))
    return {
        "mode": "training" if plan.training else "inference",
        "stages": num_workers,
        "units": plan.units,
        "split": plan.split,
        "cuts": list(plan.cuts),
        "equal": equal,
        "axis": options.axis,
        "sequence_parallel": options.sequence_parallel,
        "bound": num_workers * count / (count + num_stages - 1),
        "rounds": slowest,
        "samples": workers[0]["samples"],
        "speedups": [times["serial"] / times["ours"] for times in slowest] if equal else None,
        "ceilings": [num_workers * times["serial"] / times["together"] for times in slowest],
        "peers": {
            name: [times["serial"] / times[name] for times in slowest]
            for name in ("prepare_pippy", "torchgpipe")
            if name in slowest[0]
        },
        "stock_speedups": [times["serial"] / times["stock"] for times in slowest if "stock" in times],
        "parameters_speedups": [times["serial"] / times["parameters"] for times in slowest if "parameters" in times],
        "late": [worker["late"] for worker in workers],
        "busy": [sum(share[f"{name}_s"] for name in COMPUTING) / share["step_s"] for share in parts],
        "compute": [worker["compute"] for worker in workers],
        "parts": parts,
        "threads": [worker["threads"] for worker in workers],
    }


def describe(row: dict[str, Any]) -> str:
    """Format the row: all competitors, then each worker's medians."""
    what = f"{row['stages']} stages ({row['split']})" if row["axis"] == "pipeline" else f"{row['axis']} {row['stages']}"
    what += ", divided sequence" if row["sequence_parallel"] else ""
    text = f"{row['mode']}, {what}, bound {row['bound']:.2f}: "
    if row["equal"]:
        median = statistics.median(row["speedups"])
        text += f"{spread(row['speedups'])}, {median / row['bound']:.0%} of the bound"
        text += f", {median / row['stages']:.0%} of the ideal {row['stages']} ×"
        text += f"; relative to busy cores {spread_percent(of_busy_cores(row))} of the bound"
    else:
        text += "FAILED the parity check"
    if row["stock_speedups"] and row["equal"]:
        ratios = [ours / stock for ours, stock in zip(row["speedups"], row["stock_speedups"], strict=True)]
        text += f"; stock {spread(row['stock_speedups'])}; Stagewright over stock {spread(ratios)}"
    if row["parameters_speedups"] and row["equal"]:
        ratios = [ours / stock for ours, stock in zip(row["speedups"], row["parameters_speedups"], strict=True)]
        text += f"; stock cut by parameters {spread(row['parameters_speedups'])}, Stagewright over it {spread(ratios)}"
    for name, ratios in row["peers"].items():
        text += f"; {name} {spread(ratios)}"
    text += f"\n  serial {statistics.median(times['serial'] for times in row['rounds']) * 1e3:.1f} ms per sample"
    text += f"; {row['stages']} concurrent serial runs on these cores: {spread(row['ceilings'])}"
    text += f"\n  fastest rounds: {describe_fastest(row)}"
    for worker, kinds in enumerate(row["compute"]):
        late = row["late"][worker]
        text += f"\n  worker {worker} computes {row['busy'][worker]:.0%} of the time: " + ", ".join(
            f"{name} {value * 1e3:.1f} ms ({late[name]:.0%} late)" for name, value in kinds.items()
        )
        text += "\n    " + describe_parts(row["parts"][worker], row["threads"][worker])
    return text


def of_busy_cores(row: dict[str, Any]) -> list[float]:
    """Return the share of the bound in each round, relative to serial runs on all cores at once."""
    return [times["together"] / times["ours"] / row["bound"] for times in row["rounds"]]


def describe_fastest(row: dict[str, Any]) -> str:
    """Format the speed-up of each competitor's fastest round over the fastest serial round."""
    least = {name: min(times[name] for times in row["rounds"]) for name in row["rounds"][0]}
    shown = {"ours": 1, "stock": 1, "parameters": 1, "together": row["stages"]}
    speedups = {name: count * least["serial"] / least[name] for name, count in shown.items() if name in least}
    return ", ".join(f"{name} {ratio:.2f} ×" for name, ratio in speedups.items() if name != "ours" or row["equal"])


def describe_parts(parts: dict[str, float], threads: dict[str, float]) -> str:
    """Format the breakdown of a worker's step and the counters of its threads."""
    step_s = parts["step_s"]
    shares = {"compute": sum(parts[f"{name}_s"] for name in COMPUTING)}
    shares |= {name[:-2]: seconds for name, seconds in parts.items() if name[:-2] not in (*COMPUTING, "step")}
    text = ", ".join(f"{name} {seconds / step_s:.2%}" for name, seconds in shares.items() if seconds)
    if threads:
        text += "; counters: " + ", ".join(
            f"{name[:-2]} {value / step_s:.2%}" if name.endswith("_s") else f"{name} {value:.0f}"
            for name, value in threads.items()
        )
    return text


def spread_percent(shares: list[float]) -> str:
    return f"{statistics.median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})"


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} × ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    main()
