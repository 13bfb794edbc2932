"""Speed-up of a pipeline over serial on 2, 3, 4, 6 pinned cores, beside the bubble bound and stock torch pipelining.

    python benchmarks/pipeline_speedup.py --model deit-small --stages 2,3,4,6

Every figure is a ratio within one run on one machine: serial on one pinned core, pipelines with one core a stage, the
same micro-batches of the same batch. Each plan is first proven equal to serial. Stock torch.distributed.pipelining runs
on the same cuts (its forward-only schedule for inference, Schedule1F1B for training), timed in the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit-small")
    parser.add_argument("--stages", default="2", help="numbers of stages, with commas")
    parser.add_argument("--microbatches", type=int, default=24)
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--modes", default="inference,training")
    parser.add_argument("--units", default="auto")
    parser.add_argument("--image-size", type=int, default=None)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--no-stock", action="store_true", help="leave the comparison with stock torch out")
    parser.add_argument("--output", default="pipeline_speedup.json")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])

    from stagewright.engine.compare import run_plan
    from stagewright.plan.value import Mesh, ModelSpec, Plan

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as root:
        for mode in options.modes.split(","):
            serial_plan = Plan(
                model=ModelSpec(name=options.model, image_size=options.image_size),
                batch=options.microbatches * options.microbatch_size,
                microbatches=options.microbatches,
                units=options.units,
                training=mode == "training",
                devices=("cpu:0",),
                steps=options.steps,
                warmup=1,
            )
            serial = run_plan(serial_plan, root)
            print(f"{mode}: serial {serial['samples_per_s']:.2f} samples/s, equal {serial['equal']}", flush=True)
            for count in map(int, options.stages.split(",")):
                plan = replace(
                    serial_plan,
                    mesh=Mesh(pipeline=count),
                    schedule=options.schedule,
                    devices=tuple(f"cpu:{core}" for core in range(count)),
                )
                ours = run_plan(plan, root)
                row = {
                    "mode": mode,
                    "stages": count,
                    "cuts": ours["cuts"],
                    "equal": ours["equal"],
                    "speedup": ours["samples_per_s"] / serial["samples_per_s"] if ours["equal"] else None,
                    "bound": ours["bound"],
                }
                row["workers"] = shares(Path(ours["run"]), count)
                if not options.no_stock:
                    row["stock_speedup"] = (
                        stock(replace(plan, cuts=tuple(ours["cuts"])), root) / serial["samples_per_s"]
                    )
                rows.append(row)
                print(describe(row), flush=True)
    Path(options.output).write_text(json.dumps({"command": sys.argv, "rows": rows}, indent=2) + "\n")


def shares(run: Path, num_workers: int) -> list[dict[str, float]]:
    """Where each worker's time went, from its events: shares of the time between its first and its last."""
    from stagewright.store.run import RunFolder

    found = []
    for worker in range(num_workers):
        events = RunFolder(run).worker(worker).events()
        span = max(one["end_s"] for one in events) - min(one["start_s"] for one in events)
        parts: dict[str, float] = {}
        for one in events:
            parts[one["name"]] = parts.get(one["name"], 0.0) + (one["end_s"] - one["start_s"]) / span
        forwards = sorted(one["end_s"] - one["start_s"] for one in events if one["name"] == "F")
        found.append({**parts, "median_forward_s": forwards[len(forwards) // 2], "longest_forward_s": forwards[-1]})
    return found


def stock(plan: Any, root: str) -> float:
    """Samples a second of torch.distributed.pipelining on the same cuts."""
    from stagewright.engine.launch import launch
    from stagewright.engine.resolve import resolve_plan
    from stagewright.store.run import RunFolder

    plan = resolve_plan(plan)
    folder = RunFolder.create(root, plan)
    launch(plan, folder, job="stock_pipelining:run_job")
    results = [
        json.loads((folder.path / "workers" / str(rank) / "stock.json").read_text())
        for rank in range(plan.mesh.pipeline)
    ]
    return float(plan.batch / max(one["step_s"] for one in results))


def describe(row: dict[str, Any]) -> str:
    speedup = (
        "not equal to serial"
        if row["speedup"] is None
        else f"{row['speedup']:.2f} ×, {row['speedup'] / row['bound']:.0%} of the bound"
    )
    text = f"  {row['stages']} stages: {speedup} {row['bound']:.2f}"
    if "stock_speedup" in row:
        text += f"; stock torch {row['stock_speedup']:.2f} ×"
    for worker, parts in enumerate(row["workers"]):
        named = ", ".join(f"{name} {value:.0%}" for name, value in parts.items() if not name.endswith("_s"))
        text += f"\n    worker {worker}: {named}; forward {parts['median_forward_s'] * 1e3:.1f} ms"
        text += f" (at most {parts['longest_forward_s'] * 1e3:.1f})"
    return text


if __name__ == "__main__":
    main()
