"""Inject seeded faults into training runs, and check how each run ends.

    python benchmarks/faults.py --faults 200 --output faults.json
    python benchmarks/faults.py --only 17
    python benchmarks/faults.py --only 0-49 --update

A fault has a kind (a signal, an exception, an exit, out of memory, a disk that is full, slow or read-only, a deleted
folder, a lost agent, a cut network, a clock that jumps, a killed launcher or fork server), a moment (start, load, first
step, checkpoint, evaluation, end), a plan (pipeline, data, FSDP, tensor) and a worker. Every run must

    end within 10 s of the fault; a hang within its limit and one second
    name the worker and the cause
    have the exit code 1
    leave no process after 3 s
    lose no more than the steps since its last checkpoint
    resume from there with the losses of an uninterrupted run

A run whose disk stalls for 4 s, or whose clock jumps by an hour, must go on and have those losses. Small file systems
and two machines (network namespaces) need root; without it those faults are left out. A clock jump needs a C compiler.
``--output`` keeps the rows that the file has; ``--update`` writes docs/measured/faults.json and its table on the page.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from injection import KINDS, MOMENTS, PLANS, inject, run_here
from record import write_record
from stagewright.engine.launch import fork_server

DOCS = Path(__file__).resolve().parents[1] / "docs"
RECORD = DOCS / "measured" / "faults.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a number or a range of faults: 17, 0-49")
    parser.add_argument("--kind", help="faults of this kind alone")
    parser.add_argument("--hang-s", type=float, default=10.0, help="time limit of a hang; more on a busy machine")
    parser.add_argument("--limit-s", type=float, help="begin no further fault after this time")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--update", action="store_true", help=f"same as --output {RECORD.relative_to(DOCS.parent)}")
    parser.add_argument("--single", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.single is not None:
        run_single(json.loads(options.single))
        return
    output = RECORD if options.update else options.output
    rows = read_rows(output, options.seed)
    low, _, high = options.only.partition("-")
    chosen = range(int(low), int(high or low) + 1) if options.only else range(options.faults)
    fork_server._PRELOADED += ("sklearn.datasets",)  # the task's, which each worker would import otherwise
    fork_server.start_fork_server()
    begun_s = time.monotonic()
    for number, fault in enumerate(choose_faults(options.faults, options.seed)):
        left_out = number in rows or number not in chosen or options.kind not in (None, fault["kind"])
        if left_out or (KINDS[fault["kind"]].needs_root and os.geteuid() != 0):
            continue
        if options.limit_s is not None and time.monotonic() - begun_s > options.limit_s:
            break
        rows[number] = {"number": number, **fault, **inject(fault, options.hang_s)}
        print(json.dumps(rows[number]), flush=True)
        if output is not None:
            settings = {"faults": options.faults, "seed": options.seed, "hang_s": options.hang_s}
            write_record(output, {**settings, "rows": sorted_rows(rows)})
    if options.update:
        runpy.run_path(str(DOCS / "make_measured_figures.py"), run_name="__main__")
    summarize(sorted_rows(rows))


def read_rows(path: Path | None, seed: int) -> dict[int, dict[str, Any]]:
    """Read the rows that a file has for this seed, by number; rows that were not as wanted are run again."""
    if path is None or not path.exists():
        return {}
    record = json.loads(path.read_text())
    return {row["number"]: row for row in record["rows"] if row["ok"]} if record["seed"] == seed else {}


def sorted_rows(rows: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    return [rows[number] for number in sorted(rows)]


def choose_faults(count: int, seed: int) -> list[dict[str, Any]]:
    """Return seeded faults: each kind about as often as the others, at every moment and under every plan in turn."""
    chance = random.Random(seed)
    plans, (per_kind, more) = list(PLANS), divmod(count, len(KINDS))
    faults = []
    for number, kind in enumerate(KINDS):
        first_moment, first_plan = chance.randrange(len(MOMENTS)), chance.randrange(len(plans))
        for index in range(per_kind + (number < more)):
            # With 6 moments and 4 plans, a shift every 12 makes all 24 pairs.
            plan = plans[(first_plan + index + index // 12) % len(plans)]
            moment = MOMENTS[(first_moment + index) % len(MOMENTS)]
            faults.append({"kind": kind, "moment": moment, "plan": plan, "worker": chance.randrange(2)})
    chance.shuffle(faults)
    return faults


def run_single(told: dict[str, Any]) -> None:
    """Run one fault in this process, for its parent."""
    ending = run_here(told)
    print(ending.error, file=sys.stderr)
    print(json.dumps(ending.losses))
    sys.exit(ending.code)


def summarize(rows: list[dict[str, Any]]) -> None:
    """Print one line for each kind of fault."""
    print(f"{'fault':20} {'runs':>5} {'as wanted':>10} {'ended after, median and longest':>32} {'resumed':>8}")
    for kind, count in Counter(row["kind"] for row in rows).items():
        same = [row for row in rows if row["kind"] == kind]
        times = sorted(row["end_s"] for row in same)
        middle = f"{times[len(times) // 2]:.1f} s, {times[-1]:.1f} s"
        good, resumed = sum(row["ok"] for row in same), sum(row["resumed"] for row in same)
        print(f"{kind:20} {count:5} {good:10} {middle:>32} {resumed:8}")
    print(f"{sum(row['ok'] for row in rows)} of {len(rows)} runs ended as wanted")


if __name__ == "__main__":
    main()
