"""Capture models of other libraries and compare graph, gradients, buffers and stages with the model, bit by bit.

    python benchmarks/capture_libraries.py                              # all installed libraries, printed
    python benchmarks/capture_libraries.py --only flux timm             # some models or whole groups
    python benchmarks/capture_libraries.py --output RECORD.json --resume   # continue a sweep, written after each model

The libraries are not dependencies of this project: diffusers, x-transformers, timm, torchvision, monai, lightning and
peft are tested where they are installed. The check is that of ``capture_families.py``. Each model's own forward and
backward is timed too, because capture may take three times as long and five seconds; all times are CPU times.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch

from capture_families import shorten, strip_paths
from families.check import Outcome, check
from families.family import Family
from libraries import load_families
from record import write_record

COMMAND = "python benchmarks/capture_libraries.py"
BATCH_SIZES = (2, 3)
CASES = {"eval": False, "train": True}
LIBRARIES = (
    "torch",
    "transformers",
    "diffusers",
    "x-transformers",
    "timm",
    "torchvision",
    "monai",
    "lightning",
    "peft",
)
_PATIENCE = 20
"""Time on a busy machine over CPU time, at most."""
_START_S = 120
"""Time for a new process to import the libraries."""

Row = dict[str, Any]


class TimeLimitError(BaseException):
    """A model took longer than the limit; not an ``Exception``, so that no retry of capture catches it."""


def main() -> int:
    """Run the sweep and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these models or groups, in this order")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the record here, after each model")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the output file, skip their models")
    parser.add_argument("--update", action="store_true", help="keep the other rows of the output file")
    parser.add_argument("--limit", type=int, default=240, metavar="SECONDS", help="CPU time limit of each model")
    parser.add_argument("--processes", type=int, default=2, help="number of processes")
    options = parser.parse_args()
    families = load_families()
    record = load_record(options.output) if options.resume or options.update else {}
    rows: dict[str, Row] = {row["name"]: row for row in record.get("models", ())}
    chosen = choose(families, options.only)
    if not chosen:
        parser.error(f"no model is called {options.only[0]!r}; known: {', '.join(family.name for family in families)}")
    names = [family.name for family in chosen if not (options.resume and family.name in rows)]
    for number, row in enumerate(sweep(names, options.processes, options.limit), start=1):
        rows[row["name"]] = row
        print(f"[{number}/{len(names)}] {row['name']}: {progress(row)}", flush=True)
        if options.output is not None:
            write(options.output, [rows[family.name] for family in families if family.name in rows], families, record)
    done = [rows[family.name] for family in chosen if family.name in rows]
    return 0 if all(row[case]["passed"] for row in done for case in CASES) else 3


def choose(families: list[Family], only: list[str] | None) -> list[Family]:
    """Return the models with these names or in these groups, in the order of the names."""
    if only is None:
        return families
    by_name = {family.name: family for name in only for family in families if name in (family.name, family.group)}
    return list(by_name.values())


def sweep(names: list[str], num_processes: int, limit_s: int) -> Iterator[Row]:
    """Check models in fresh processes, and yield their rows as they come."""
    if not names:
        return
    context = multiprocessing.get_context("spawn")
    jobs = [(name, limit_s) for name in names]
    with context.Pool(min(num_processes, len(names)), initializer=prepare, maxtasksperchild=50) as pool:
        rows = pool.imap_unordered(run, jobs)
        for _ in jobs:
            # A process that is killed takes its model with it, and the pool would wait for it forever.
            yield rows.next(timeout=_PATIENCE * limit_s + _START_S if limit_s else None)


def prepare() -> None:
    """Use one thread, and capture once, so that no model's time includes the imports of torch.export."""
    torch.set_num_threads(1)
    run(("parametrize", 0))


def run(job: tuple[str, int]) -> Row:
    """Check one model in both modes, with a time limit in seconds (0: none)."""
    name, limit_s = job
    family = next(family for family in load_families() if family.name == name)
    row: Row = {"name": name, "group": family.group, "class": family.model_class}
    row |= dict.fromkeys(CASES, asdict(failed(f"not checked: the model took more than {limit_s} s of CPU time")))
    with limited(limit_s):
        for case, training in CASES.items():
            outcome = check(family, training=training, units="auto", batch_sizes=BATCH_SIZES)
            outcome = replace(outcome, reason=strip_paths(outcome.reason), remark=strip_paths(outcome.remark))
            row[case] = asdict(outcome)
    return row


def failed(reason: str) -> Outcome:
    """Return the outcome of a model that was not checked."""
    counts = dict.fromkeys(("num_calls", "num_crossing", "crossing_bytes"), 0)
    return Outcome(passed=False, reason=reason, remark="", capture_s=0.0, stages_equal=False, **counts)


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Leave the block after some CPU time; 0 is no limit."""

    def stop(*_: Any) -> None:
        raise TimeLimitError

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    except TimeLimitError:
        return
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def progress(row: Row) -> str:
    """Summarize a model in one line."""
    first = row["train"]
    parts = [f"{first['num_calls']} units, {first['capture_cpu_s']:.2f} s, step {first['step_cpu_s']:.2f} s"]
    for case in CASES:
        outcome = row[case]
        verdict = "REFUSED" if outcome["refused"] else "FAILS"
        parts.append(f"{case} " + ("passes" if outcome["passed"] else f"{verdict} ({shorten(outcome['reason'], 700)})"))
    return ", ".join(parts)


def load_record(path: Path | None) -> dict[str, Any]:
    """Load an existing record."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {}
    return record


def write(path: Path, rows: list[Row], families: list[Family], record: dict[str, Any]) -> None:
    """Write the record; a sweep that is continued keeps its first command and time."""
    counts = Counter(family.group for family in families)
    figures = {"versions": versions(), "batch_sizes": list(BATCH_SIZES), "listed": counts, "models": rows}
    begun = {"begun": record["begun"]} if "begun" in record else {}
    write_record(path, {**begun, "command": COMMAND, **figures})


def versions() -> dict[str, str]:
    """Return the versions of the installed libraries."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
