"""Capture models of other libraries and compare graph, gradients, buffers and stages with the model, bit by bit.

    python benchmarks/capture_libraries.py                        # all installed libraries; writes page and JSON
    python benchmarks/capture_libraries.py --only flux timm-resnet18  # some, printed only; --update writes them

The libraries are not dependencies of this project: diffusers, x-transformers, timm, torchvision, monai, lightning and
peft are tested where they are installed. The check is that of ``capture_families.py``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch

from capture_families import mark, remark, shorten, strip_paths
from families.check import Outcome, check
from families.family import Family
from libraries import load_families

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "capture-libraries.md"
DATA = ROOT / "docs" / "capture-libraries.json"
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

Row = dict[str, Any]


def main() -> int:
    """Run the sweep and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these models or groups; nothing is written")
    parser.add_argument("--update", action="store_true", help="with --only: update their rows of the page")
    parser.add_argument("--processes", type=int, default=2, help="number of processes")
    options = parser.parse_args()
    families = load_families()
    chosen = [family for family in families if not options.only or {family.name, family.group} & set(options.only)]
    if options.only:  # in the order in which they are named
        order = options.only
        chosen.sort(key=lambda family: order.index(family.name) if family.name in order else order.index(family.group))
    if not chosen:
        parser.error(f"no model is called {options.only[0]!r}; known: {', '.join(family.name for family in families)}")
    rows: dict[str, Row] = {}
    writes = options.update or not options.only
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(options.processes, len(chosen)), initializer=prepare, maxtasksperchild=25) as pool:
        for number, (name, row) in enumerate(pool.imap_unordered(run, [f.name for f in chosen]), start=1):
            rows[name] = row
            if writes:  # after each, because a sweep takes long
                write(rows, families, keep=options.update)
            print(f"[{number}/{len(chosen)}] {name}: {progress(row)}", flush=True)
    return 0 if all(row[case]["passed"] for row in rows.values() for case in CASES) else 3


def write(rows: dict[str, Row], families: list[Family], *, keep: bool) -> None:
    """Write page and data; ``keep`` the rows of models that were not repeated."""
    known = {entry["name"]: entry for entry in load_rows()} if keep else {}
    entries = [(known | rows)[family.name] for family in families if family.name in known | rows]
    PAGE.write_text(page(entries, families), encoding="utf-8")
    DATA.write_text(json.dumps(data(entries), indent=1) + "\n", encoding="utf-8")


def prepare() -> None:
    """Use one thread, and capture once, so that no model's time includes the imports of torch.export."""
    torch.set_num_threads(1)
    run("parametrize")


def run(name: str) -> tuple[str, Row]:
    """Check one model in both modes."""
    family = next(family for family in load_families() if family.name == name)
    row: Row = {"name": name, "group": family.group, "class": family.model_class}
    for case, training in CASES.items():
        outcome = check(family, training=training, units="auto", batch_sizes=BATCH_SIZES)
        outcome = replace(outcome, reason=strip_paths(outcome.reason), remark=strip_paths(outcome.remark))
        row[case] = asdict(outcome)
    row["step_s"] = step_seconds(family)
    return name, row


def step_seconds(family: Family) -> float:
    """Measure one forward and backward of the model in train mode, after a warm-up."""
    try:
        model = family.build().train()
        for _ in range(2):
            args, kwargs = family.example(BATCH_SIZES[0])
            start = time.perf_counter()
            output = model(*args, **kwargs)
            from stagewright import structure

            roots = [leaf for leaf in structure.tensors(output) if leaf.requires_grad]
            torch.autograd.backward([root.sum() for root in roots])
            seconds = time.perf_counter() - start
    except Exception:  # the check reports it
        return 0.0
    return seconds


def progress(row: Row) -> str:
    """Summarize a model in one line."""
    first = row["train"]
    parts = [f"{first['num_calls']} units, {first['capture_s']:.2f} s, step {row['step_s']:.2f} s"]
    for case in CASES:
        outcome = row[case]
        parts.append(f"{case} " + ("passes" if outcome["passed"] else f"FAILS ({shorten(outcome['reason'], 500)})"))
    return ", ".join(parts)


def load_rows() -> list[Row]:
    """Load the rows of the existing page."""
    rows: list[Row] = json.loads(DATA.read_text(encoding="utf-8"))["models"] if DATA.exists() else []
    return rows


def versions() -> dict[str, str]:
    """Return the versions of the installed libraries."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def data(entries: list[Row]) -> dict[str, Any]:
    """Return the page's data as JSON values."""
    return {
        "versions": versions(),
        "batch_sizes": list(BATCH_SIZES),
        "passed": {case: sum(entry[case]["passed"] for entry in entries) for case in CASES},
        "models": entries,
    }


def page(entries: list[Row], families: list[Family]) -> str:
    """Write the page."""
    counts = {case: sum(entry[case]["passed"] for entry in entries) for case in CASES}
    seconds = [entry["train"]["capture_s"] for entry in entries if entry["train"]["capture_s"]]
    lines = [
        "# Models of other libraries tested with capture",
        "",
        f"**{counts['eval']} of {len(entries)}** models pass in eval mode and **{counts['train']} of {len(entries)}** "
        "in train mode, with automatic units.",
        "",
        ", ".join(f"{name} {version}" for name, version in versions().items()) + ". Random weights. Each model is "
        f"captured with a batch of {BATCH_SIZES[0]} and compared with the original at batches of "
        f"{' and '.join(map(str, BATCH_SIZES))} with the same seed; *passes* has the meaning of "
        "[the table for transformers](capture-families.md). Where torchvision's compiled operators do not match the "
        "installed torch, the script defines them in Python.",
        "",
        f"Capture in train mode takes {statistics.median(seconds):.2f} s (median), at most {max(seconds):.1f} s, on "
        "one core of a busy machine. *Step* is one forward and backward of the model itself.",
        "",
        "This page and `capture-libraries.json` are generated by",
        "",
        "    python benchmarks/capture_libraries.py",
        "",
    ]
    by_name = {family.name: family for family in families}
    for group in dict.fromkeys(entry["group"] for entry in entries):
        lines += [
            f"## {group}",
            "",
            "| model | class | units | crossing | capture (s) | step (s) | eval | train | remark |",
            "|---|---|--:|--:|--:|--:|:-:|:-:|---|",
        ]
        for entry in (entry for entry in entries if entry["group"] == group):
            outcomes = {case: Outcome(**entry[case]) for case in CASES}
            first = outcomes["train"]
            cells = [
                entry["name"],
                entry["class"],
                str(first.num_calls) if first.num_calls else "–",
                f"{first.num_crossing}, {first.crossing_bytes} B" if first.num_calls else "–",
                f"{first.capture_s:.2f}" if first.num_calls else "–",
                f"{entry['step_s']:.2f}",
                mark(outcomes["eval"]),
                mark(first),
                remark(by_name[entry["name"]], outcomes),
            ]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
