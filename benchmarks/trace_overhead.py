"""What recording events costs: steps with and without it, in turns, in the same processes.

    python benchmarks/trace_overhead.py --model digits-vit --mesh pipeline=2 --microbatches 8

Each pair of steps gives one ratio, and which of the two comes first changes from pair to pair. What is printed is the
ratio of the medians over all pairs less 1, with the same for two steps that are both without recording: how far apart
they are by chance. The clock alone gives a limit: an event reads it twice.
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
    sys.path.insert(0, str(JOBS))  # workers are copies of this process, and look for their job here
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
        found = [json.loads((folder.worker(rank).path / "pairs.json").read_text()) for rank in folder.workers()]
    row = {"clock_s": clock_s(), "workers": found}
    write_record(options.output, row)
    for rank, one in enumerate(found):
        print(describe(rank, one, row["clock_s"]))


def clock_s(repeats: int = 200_000) -> float:
    """Reading the clock once."""
    start = time.perf_counter()
    for _ in range(repeats):
        time.perf_counter()
    return (time.perf_counter() - start) / repeats


def describe(rank: int, one: dict[str, Any], clock: float) -> str:
    limit = 2 * clock * one["events"] / one["without_s"]
    return (
        f"worker {rank}: {one['events']} events in a step of {one['without_s'] * 1e3:.2f} ms; recording costs "
        f"{one['overhead']:+.2%} ({one['by_chance']:+.2%} by chance; the clock alone {limit:.2%}); "
        f"{one['event_s'] * 1e6:.2f} µs an event"
    )


if __name__ == "__main__":
    main()
