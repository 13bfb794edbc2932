"""Cost of recording events: steps with and without it, alternating in the same processes.

    python benchmarks/trace_overhead.py --model digits-vit --mesh pipeline=2 --microbatches 8

The order alternates from pair to pair. Printed is the ratio of the medians over all pairs minus 1, and the same for two
steps without recording: the random difference. Reading the clock is a lower limit: an event reads it twice.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import write_record

JOBS = Path(__file__).resolve().parent / "jobs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="digits-vit")
    parser.add_argument("--mesh", default="pipeline=2")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--output", default="trace_overhead.json")
    options = parser.parse_args()
    sys.path.insert(0, str(JOBS))  # workers are forked from this process and import their job from here
    os.environ["TRACE_PAIRS"] = str(options.pairs)
    from stagewright.engine.launch.launcher import launch
    from stagewright.engine.parallel.resolve import resolve_plan
    from stagewright.runs.run_folder import RunFolder
    from stagewright.spec.plan import Mesh, ModelSpec, Plan

    plan = resolve_plan(
        Plan(
            model=ModelSpec(name=options.model),
            batch=options.batch,
            microbatches=options.microbatches,
            mesh=Mesh.parse(options.mesh),
            recompute=options.recompute,
        )
    )
    with tempfile.TemporaryDirectory() as root:
        folder = RunFolder.create(root, plan)
        launch(plan, folder, job="trace_pairs:run_job")
        workers = [json.loads((folder.worker(rank).path / "pairs.json").read_text()) for rank in folder.workers()]
    row = {"clock_s": clock_s(), "workers": workers}
    write_record(options.output, row)
    for rank, worker in enumerate(workers):
        print(describe(rank, worker, row["clock_s"]))


def clock_s(repeats: int = 200_000) -> float:
    """Return the time to read the clock once."""
    start = time.perf_counter()
    for _ in range(repeats):
        time.perf_counter()
    return (time.perf_counter() - start) / repeats


def describe(rank: int, worker: dict[str, Any], clock: float) -> str:
    limit = 2 * clock * worker["events"] / worker["without_s"]
    return (
        f"worker {rank}: {worker['events']} events in a step of {worker['without_s'] * 1e3:.2f} ms; recording costs "
        f"{worker['overhead']:+.2%} (random difference {worker['by_chance']:+.2%}; the clock alone {limit:.2%}); "
        f"{worker['event_s'] * 1e6:.2f} µs per event"
    )


if __name__ == "__main__":
    main()
