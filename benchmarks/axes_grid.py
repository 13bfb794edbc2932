"""Check every parallel axis on every kind of model against the single-device baseline, in one table.

    python benchmarks/axes_grid.py --processes 16 --output docs/measured/axes_grid.json
    python benchmarks/axes_grid.py --only "Mixtral, expert parallelism" "T5, ZeRO-1, 2 workers, alone, training"

Seven tiny models with dropout, eight axes over 2 and 4 workers, alone and with a pipeline of two stages, in training
and inference. Loss, outputs, gradients, buffers and the optimizer step are compared in float32, at 1e-5. Cases that the
output file already holds are not repeated, unless `--repeat` names their results. Exits with code 3 if a case differs
or fails.
"""

from __future__ import annotations

import argparse
import json
import logging
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

from axes.cases import Case, all_cases
from axes.models import MODELS
from axes.workers import run_cases
from record import write_record

RESULTS = ("equal", "refused", "n/a", "different", "failed")
PRELOADED = ("torch._dynamo", "torch.export._trace")
"""What workers import beside; imported once, before the forks."""
WRITE_S = 5.0
"""Least time between two writes of the record."""


def main() -> int:
    """Check the cases and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="only cases that begin with one of these words")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="workers at a time")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="end after so many seconds")
    parser.add_argument("--repeat", nargs="*", choices=RESULTS, default=[], help="repeat cases with these results")
    parser.add_argument("-o", "--output", type=Path, default=Path("axes_grid.json"))
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit_s
    preload()
    rows = load_rows(options.output, options.repeat)
    selected = [case for case in all_cases() if case not in rows and is_selected(case, options.only)]
    rows |= {case: {"result": "n/a", "reason": reason} for case in selected if (reason := case.not_applicable())}
    to_run = [case for case in selected if case not in rows]
    last_write = 0.0
    for case, outcome in run_cases(to_run, options.processes, deadline):
        rows[case] = outcome
        print(f"{case.words}: {describe(outcome)}", flush=True)
        if time.monotonic() - last_write > WRITE_S:
            write(options.output, rows)
            last_write = time.monotonic()
    write(options.output, rows)
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


def load_rows(path: Path, repeat: list[str]) -> dict[Case, dict[str, Any]]:
    """Read the rows of an earlier run, less those to repeat."""
    if not path.exists():
        return {}
    fields = Case.__slots__
    rows = [row for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if row["result"] not in repeat]
    return {
        Case(**{name: row[name] for name in fields}): {name: row[name] for name in row if name not in fields}
        for row in rows
    }


def write(path: Path, rows: dict[Case, dict[str, Any]]) -> None:
    """Write the record, in the order of the table."""
    ordered = [{**asdict(case), **rows[case]} for case in all_cases() if case in rows]
    write_record(path, {"versions": {"transformers": transformers.__version__}, "rows": ordered})


if __name__ == "__main__":
    sys.exit(main())
