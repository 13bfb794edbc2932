"""Inject seeded faults into training runs, and check how each run ends.

    python benchmarks/faults.py --output faults.json
    python benchmarks/faults.py --at-once 14 --limit-s 480 --output faults.json
    python benchmarks/faults.py --only 17
    python benchmarks/faults.py --part 1/4 --update

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
and two machines (network namespaces) need root, a clock jump needs a C compiler; kinds of faults that this machine
can't have are left out. ``--output`` keeps the rows of the file that were as wanted, so a run that was stopped goes on;
``--update`` writes docs/measured/faults.json and its table on the page.
"""

from __future__ import annotations

import argparse
import json
import random
import runpy
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from injection import KINDS, MOMENTS, PLANS, run_here
from injection.lanes import run_lane, run_lanes
from injection.requirements import find_missing
from record import machine_text, write_record

DOCS = Path(__file__).resolve().parents[1] / "docs"
RECORD = DOCS / "measured" / "faults.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="numbers and ranges of faults: 17, 0-49,60")
    parser.add_argument("--part", default="1/1", help="every n-th fault, from the i-th: i/n")
    parser.add_argument("--kind", help="faults of these kinds alone, with commas")
    parser.add_argument("--at-once", type=int, default=1, help="how many faults at once, each on cores of its own")
    parser.add_argument("--hang-s", type=float, default=10.0, help="time limit of a hang; more on a busy machine")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no further fault after this time")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--update", action="store_true", help=f"same as --output {RECORD.relative_to(DOCS.parent)}")
    parser.add_argument("--single", help=argparse.SUPPRESS)
    parser.add_argument("--lane", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.single is not None:
        run_single(json.loads(options.single))
        return
    if options.lane is not None:
        run_lane(json.loads(options.lane))
        return
    begun_s = time.monotonic()
    output = RECORD if options.update else options.output
    rows = read_rows(output, options.seed)
    left_out, machine = find_missing(), machine_text()
    for kind, reason in left_out.items():
        print(f"left out: {kind}: {reason}", flush=True)
    faults = choose_faults(options.faults, options.seed)
    chosen = choose_numbers(options.only, options.part, len(faults))
    kinds = set(options.kind.split(",") if options.kind else KINDS) - left_out.keys()
    todo = [number for number in chosen if number not in rows and faults[number]["kind"] in kinds]
    # Those that take longest begin first, so that all lanes end together.
    todo.sort(key=lambda number: KINDS[faults[number]["kind"]].order)

    def save(row: dict[str, Any]) -> None:
        rows[row["number"]] = row = {**row, "machine": machine}
        print(f"{time.monotonic() - begun_s:.0f} s", json.dumps(row), flush=True)
        if output is not None:
            settings = {"faults": options.faults, "seed": options.seed, "hang_s": options.hang_s, "left_out": left_out}
            write_record(output, {**settings, "rows": sorted_rows(rows)})

    with tempfile.TemporaryDirectory() as references:
        run_lanes(
            [{"number": number, **faults[number]} for number in todo],
            options.at_once,
            options.hang_s,
            Path(references),
            save,
            lambda: time.monotonic() - begun_s > options.limit_s,
        )
    if options.update:
        runpy.run_path(str(DOCS / "make_measured_figures.py"), run_name="__main__")
    summarize(sorted_rows(rows))


def choose_numbers(only: str, part: str, count: int) -> list[int]:
    """Return the numbers of the chosen faults.

    >>> choose_numbers("0-4,7", "1/2", 200)
    [0, 2, 4]
    """
    numbers = set()
    for text in only.split(",") if only else [f"0-{count - 1}"]:
        low, _, high = text.partition("-")
        numbers |= set(range(int(low), int(high or low) + 1))
    index, _, parts = part.partition("/")
    return [number for number in sorted(numbers) if number % int(parts) == int(index) - 1]


def read_rows(path: Path | None, seed: int) -> dict[int, dict[str, Any]]:
    """Read the rows that a file has for this seed, by number; rows that were not as wanted are run again."""
    if path is None or not path.exists():
        return {}
    record = json.loads(path.read_text())
    rows = [{"machine": record["machine"], **row} for row in record["rows"] if row["ok"]]
    return {row["number"]: row for row in rows} if record["seed"] == seed else {}


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
