"""Check every parallel axis on every kind of model against the single-device baseline, in one table.

    python benchmarks/axes_grid.py --processes 16 --output docs/measured/axes_grid.json
    python benchmarks/axes_grid.py --only "Mixtral, expert parallelism" "T5, ZeRO-1, 2 workers, alone, training"
    python benchmarks/axes_grid.py --devices cuda:0/8 --jobs training --only Llama "Mixtral, expert" --case-s 45

Seven tiny models with dropout, eight axes over 2 and 4 workers, alone and with a pipeline of two stages, in training
and inference. Loss, outputs, gradients, buffers and the optimizer step are compared in float32, at 1e-5. Cases that the
output file already holds are not repeated, unless `--repeat` names their results; the record then names both runs.
With `--devices cuda:0/8`, each worker has 1/8 of a GPU's SMs (CUDA MPS); `--precision bf16` uses autocast. Exits with
code 3 if a case differs or fails.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import transformers

from axes.cases import JOBS, Case, all_cases
from axes.models import MODELS
from axes.workers import CASE_S, Conditions, run_cases
from record import machine_text, write_record
from stagewright.cluster.device import Device
from stagewright.errors import UsageError

RESULTS = ("equal", "refused", "n/a", "different", "failed")
PRELOADED = ("torch._dynamo", "torch.export._trace")
"""What workers import beside; imported once, before the forks."""
WRITE_S = 1.0
"""Least time between two writes of the record."""


def main() -> int:
    """Check the cases and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="only cases that begin with one of these words")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=JOBS, help="training, inference or both")
    parser.add_argument("--devices", default="cpu", help="of each worker: cpu (a core), or a share of a GPU: cuda:0/8")
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32", help="bf16: autocast")
    parser.add_argument("--case-s", type=float, default=CASE_S, help="time limit of a case, in seconds")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="workers at a time")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="end after so many seconds")
    parser.add_argument("--repeat", nargs="*", choices=RESULTS, default=[], help="repeat cases with these results")
    parser.add_argument("-o", "--output", type=Path, default=Path("axes_grid.json"))
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit_s
    if options.devices != "cpu" and Device.parse(options.devices).share == 1:
        parser.error(f"--devices {options.devices}: name cpu, or a share of a GPU such as cuda:0/8")
    conditions = Conditions(device=options.devices, precision=options.precision, case_s=options.case_s)
    preload()
    machine = describe_machine()
    earlier = load_record(options.output)
    rows = load_rows(earlier)
    to_check = [case for case in all_cases() if case.job in options.jobs and is_selected(case, options.only)]
    selected = [case for case in to_check if case not in rows or rows[case]["result"] in options.repeat]
    rows = {case: rows[case] for case in rows if case not in selected}
    rows |= {case: {"result": "n/a", "reason": reason} for case in selected if (reason := case.not_applicable())}
    to_run = [case for case in selected if case not in rows]
    last_write = 0.0
    for case, outcome in run_cases(to_run, options.processes, deadline, conditions):
        rows[case] = outcome
        print(f"{case.words}: {describe(outcome)}", flush=True)
        if time.monotonic() - last_write > WRITE_S:
            write(options.output, rows, earlier, len(selected), machine)
            last_write = time.monotonic()
    write(options.output, rows, earlier, len(selected), machine)
    counts = Counter(outcome["result"] for outcome in rows.values())
    print(", ".join(f"{counts[result]} {result}" for result in RESULTS) + f"; wrote {options.output}")
    return 3 if counts["different"] or counts["failed"] else 0


def preload() -> None:
    """Import what workers need once, before they are forked."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    for name in PRELOADED:
        import_module(name)
    for class_name, _ in MODELS.values():
        getattr(transformers, class_name)  # transformers imports a model's module when it is first named


def is_selected(case: Case, only: list[str] | None) -> bool:
    """Whether the case begins with one of the words; all do if there are none."""
    return only is None or any(case.words.startswith(words) for words in only)


def describe(outcome: dict[str, Any]) -> str:
    """Say the outcome in words."""
    error = f", error {outcome['error']:.1e}" if "error" in outcome else ""
    reason = f": {outcome['reason']}" if outcome["reason"] else ""
    return f"{outcome['result']}{error}{reason} ({outcome['seconds']:.1f} s)"


def load_record(path: Path) -> dict[str, Any]:
    """Load the record of earlier runs."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return record


def load_rows(record: dict[str, Any]) -> dict[Case, dict[str, Any]]:
    """Return the outcomes of earlier runs."""
    fields = Case.__slots__
    return {
        Case(**{name: row[name] for name in fields}): {name: row[name] for name in row if name not in fields}
        for row in record.get("rows", ())
    }


def describe_machine() -> str:
    """Describe this machine, in a child: this process must not use CUDA, because the workers are forked from it."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(machine_text)


def write(
    path: Path, rows: dict[Case, dict[str, Any]], earlier: dict[str, Any], num_selected: int, machine: str
) -> None:
    """Write the record, in the order of the table; earlier runs stay named."""
    ordered = [{**asdict(case), **rows[case]} for case in all_cases() if case in rows]
    runs = list(earlier.get("earlier", ()))
    if earlier:
        runs.append({name: earlier[name] for name in ("command", "machine", "begun", "versions")})
    versions = {"transformers": transformers.__version__}
    figures = {"versions": versions, "checked": num_selected, "earlier": runs, "rows": ordered}
    write_record(path, figures, machine)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        sys.exit(f"axes_grid.py: {error}")
