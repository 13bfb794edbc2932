"""Capture every model family and compare graph, gradients, buffers and stages with the model, bit by bit.

    python benchmarks/capture_families.py                    # all, in two processes; writes the page and the JSON
    python benchmarks/capture_families.py --only bert gpt2   # some, printed only; --update writes them into the page

Batches of 2, 3, 1 and 5 from an example of 2, in eval and train mode, with automatic units and at leaf level.
Exits with code 3 if fewer than 97 % pass with automatic units.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch
import transformers

from families import FAMILIES, Family
from families.check import BATCH_SIZES, Outcome, check

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "capture-families.md"
DATA = ROOT / "docs" / "capture-families.json"
THRESHOLD = 0.97
CASES = {"eval": ("auto", False), "train": ("auto", True), "leaf eval": ("leaf", False), "leaf train": ("leaf", True)}
"""Units and mode of each column."""

Row = dict[str, Outcome]
"""The outcome of each case of one family."""


def main() -> int:
    """Run the sweep and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these families; nothing is written")
    parser.add_argument("--update", action="store_true", help="with --only: update their rows of the page")
    parser.add_argument("--no-leaf", action="store_true", help="automatic units only; nothing is written")
    parser.add_argument("--processes", type=int, default=2, help="number of processes")
    options = parser.parse_args()
    names = [family.name for family in FAMILIES]
    unknown = sorted(set(options.only or ()) - set(names))
    if unknown:
        parser.error(f"unknown family {unknown[0]!r}; known: {', '.join(names)}")
    cases = [case for case in CASES if not (options.no_leaf and case.startswith("leaf"))]
    jobs = [(name, cases) for name in names if not options.only or name in options.only]
    start = time.perf_counter()
    rows: dict[str, Row] = {}
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(options.processes, len(jobs)), initializer=prepare) as pool:
        for number, (name, row) in enumerate(pool.imap_unordered(run, jobs), start=1):
            rows[name] = row
            print(f"[{number}/{len(jobs)}] {name}: {progress(row)}", flush=True)
    rows = {name: rows[name] for name in names if name in rows}
    print(f"{time.perf_counter() - start:.0f} s; " + "; ".join(f"{case} {rate(rows, case)}" for case in cases))
    if (options.update or not options.only) and not options.no_leaf:
        table_rows = load_rows() | rows if options.update else rows
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(table_rows), encoding="utf-8")
        DATA.write_text(json.dumps(data(table_rows), indent=1) + "\n", encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)} and {DATA.relative_to(ROOT)}")
    passed = min(sum(row[case].passed for row in rows.values()) for case in ("eval", "train"))
    return 0 if passed >= THRESHOLD * len(rows) else 3


def prepare() -> None:
    """Use one thread, and capture once, so that no family's time includes the imports of torch.export."""
    torch.set_num_threads(1)
    run(("mlp", ["eval"]))


def run(job: tuple[str, list[str]]) -> tuple[str, Row]:
    """Check all cases of one family."""
    name, cases = job
    family = next(family for family in FAMILIES if family.name == name)
    row: Row = {}
    for case in cases:
        units, training = CASES[case]
        outcome = check(family, training=training, units=units)
        row[case] = replace(outcome, reason=strip_paths(outcome.reason), remark=strip_paths(outcome.remark))
    return name, row


def strip_paths(text: str) -> str:
    """Remove the folders of this machine from a message."""
    return re.sub(r"/\S*/site-packages/", "", text).replace(f"{ROOT}/", "")


def progress(row: Row) -> str:
    """Summarize a family in one line."""
    first = row["eval"]
    parts = [f"{first.num_calls} units, {first.capture_s:.2f} s"]
    for case, outcome in row.items():
        parts.append(f"{case} " + ("passes" if outcome.passed else f"FAILS ({outcome.reason})"))
    return ", ".join(parts)


def rate(rows: dict[str, Row], case: str) -> str:
    """Format how many families pass."""
    passed = sum(row[case].passed for row in rows.values())
    return f"{passed} of {len(rows)} ({100 * passed / len(rows):.1f} %)"


def data(rows: dict[str, Row]) -> dict[str, Any]:
    """Return the page's data as JSON values."""
    return {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "batch_sizes": list(BATCH_SIZES),
        "passed": {case: sum(row[case].passed for row in rows.values()) for case in CASES},
        "families": [
            {
                "name": family.name,
                "group": family.group,
                "class": family.model_class,
                **{case: asdict(rows[family.name][case]) for case in CASES},
            }
            for family in FAMILIES
        ],
    }


def load_rows() -> dict[str, Row]:
    """Load the rows of the existing page."""
    families = json.loads(DATA.read_text(encoding="utf-8"))["families"]
    return {entry["name"]: {case: Outcome(**entry[case]) for case in CASES} for entry in families}


def page(rows: dict[str, Row]) -> str:
    """Write the page."""
    refused = [family.name for family in FAMILIES if family.fails is not None]
    num_plain = sum(family.group == "plain" for family in FAMILIES)
    types = {
        getattr(transformers, family.model_class).config_class.model_type
        for family in FAMILIES
        if family.group != "plain"
    }
    automatic = [row[case] for row in rows.values() for case in ("eval", "train")]
    seconds = [outcome.capture_s for outcome in automatic if outcome.capture_s]
    lines = [
        "# Models tested with capture",
        "",
        f"With automatic units **{rate(rows, 'eval')}** pass in eval mode and **{rate(rows, 'train')}** in train mode; "
        f"at leaf level {rate(rows, 'leaf eval')} and {rate(rows, 'leaf train')}.",
        "",
        f"{len(FAMILIES) - num_plain} models of {len(types)} transformers families and {num_plain} plain modules, all "
        f"tiny and with random weights; torch {torch.__version__}, transformers {transformers.__version__}. Each is "
        f"captured with a batch of {BATCH_SIZES[0]} and compared with the original model at batches of "
        f"{', '.join(map(str, BATCH_SIZES))} with the same seed. A model *passes* if outputs (in train mode also all "
        "gradients and buffers) are bit-identical, capture leaves the model unchanged, and three stages with separate "
        "backward passes, as on separate workers, have bit-identical outputs and gradients within 1e-5 (floating-point "
        f"reordering; bit-identical for {sum(outcome.stages_equal for outcome in automatic)} of {len(automatic)}). "
        f"`{'`, `'.join(refused)}` passes if capture refuses it with an error that names the line.",
        "",
        f"Capture with automatic units takes {statistics.median(seconds):.2f} s (median), at most {max(seconds):.1f} s "
        "on one core of a busy machine, after a first capture in the process.",
        "",
        "This page and `capture-families.json` are generated by",
        "",
        "    python benchmarks/capture_families.py",
        "",
        "`--only NAME` repeats one family. *Crossing*: number and bytes of the tensors that cross the middle cut in "
        "eval mode, for a batch of two. *Capture* is the time in eval mode. *Leaf*: eval and train mode, and "
        "the number of units.",
        "",
    ]
    for group in dict.fromkeys(family.group for family in FAMILIES):
        families = [family for family in FAMILIES if family.group == group]
        lines += [f"## {group.capitalize()}", "", *folded(f"{len(families)} models", table(families, rows))]
    return "\n".join(lines)


def folded(title: str, lines: list[str]) -> list[str]:
    """Fold lines of a page away, behind a title."""
    text = "\n".join(lines).strip("\n")
    return [f'<details markdown="1"><summary>{title}</summary>', "", *text.splitlines(), "", "</details>", ""]


def table(families: list[Family], rows: dict[str, Row]) -> list[str]:
    """Write one group as a table."""
    lines = [
        "| family | class | units | crossing | capture (s) | eval | train | leaf (units) | remark |",
        "|---|---|--:|--:|--:|:-:|:-:|:-:|---|",
    ]
    for family in families:
        row = rows[family.name]
        first, leaf = row["eval"], row["leaf eval"]
        captured = first.num_calls > 0
        cells = [
            family.name,
            family.model_class,
            str(first.num_calls) if captured else "–",
            f"{first.num_crossing}, {first.crossing_bytes} B" if captured else "–",
            f"{first.capture_s:.2f}" if captured else "–",
            mark(row["eval"]),
            mark(row["train"]),
            f"{mark(leaf)} {mark(row['leaf train'])} ({leaf.num_calls})",
            remark(family, row),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def mark(outcome: Outcome) -> str:
    """Mark a pass or a failure."""
    return "✓" if outcome.passed else "✗"


def remark(family: Family, row: Row) -> str:
    """Join the family's remark, what was skipped, and the reason of every failure."""
    failures: dict[str, list[str]] = {}
    for case, outcome in row.items():
        if outcome.reason:
            failures.setdefault(shorten(outcome.reason), []).append(case)
    parts = [part for part in (family.remark, row["eval"].remark, row["train"].remark) if part]
    parts += [f"{', '.join(cases)}: {reason}" for reason, cases in failures.items()]
    return "; ".join(shorten(part) for part in dict.fromkeys(parts))


def shorten(text: str, max_length: int = 300) -> str:
    """Cut a text to fit a table."""
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


if __name__ == "__main__":
    sys.exit(main())
