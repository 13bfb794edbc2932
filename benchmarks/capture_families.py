"""Capture every family and compare graph, gradients, buffers and stages with the model, to the last bit.

    python benchmarks/capture_families.py                    # all, in two processes; writes the table and the JSON
    python benchmarks/capture_families.py --only bert gpt2   # some, printed only; --update puts them into the table

Batches of 2, 3, 1 and 5 from an example of 2, in eval and train mode, with automatic units and at leaf level.
Exits with 3 if fewer than 97 % pass with automatic units.
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
"""Units and mode of every column."""

Row = dict[str, Outcome]
"""The outcome of each case of one family."""


def main() -> int:
    """Run the sweep; the exit code says whether enough families pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these families; nothing is written")
    parser.add_argument("--update", action="store_true", help="with --only: put these into the table that is there")
    parser.add_argument("--no-leaf", action="store_true", help="automatic units only; nothing is written")
    parser.add_argument("--processes", type=int, default=2, help="how many processes share the work")
    options = parser.parse_args()
    names = [family.name for family in FAMILIES]
    unknown = sorted(set(options.only or ()) - set(names))
    if unknown:
        parser.error(f"unknown family {unknown[0]!r}; known: {', '.join(names)}")
    cases = [case for case in CASES if not (options.no_leaf and case.startswith("leaf"))]
    wanted = [(name, cases) for name in names if not options.only or name in options.only]
    start = time.perf_counter()
    rows: dict[str, Row] = {}
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(options.processes, len(wanted)), initializer=prepare) as pool:
        for number, (name, row) in enumerate(pool.imap_unordered(run, wanted), start=1):
            rows[name] = row
            print(f"[{number}/{len(wanted)}] {name}: {progress(row)}", flush=True)
    rows = {name: rows[name] for name in names if name in rows}
    print(f"{time.perf_counter() - start:.0f} s; " + "; ".join(f"{case} {rate(rows, case)}" for case in cases))
    if (options.update or not options.only) and not options.no_leaf:
        table_rows = stored() | rows if options.update else rows
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(table_rows), encoding="utf-8")
        DATA.write_text(json.dumps(data(table_rows), indent=1) + "\n", encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)} and {DATA.relative_to(ROOT)}")
    passed = min(sum(row[case].passed for row in rows.values()) for case in ("eval", "train"))
    return 0 if passed >= THRESHOLD * len(rows) else 3


def prepare() -> None:
    """One thread, and a first capture, which imports what export needs, so that no family's time holds that."""
    torch.set_num_threads(1)
    run(("mlp", ["eval"]))


def run(job: tuple[str, list[str]]) -> tuple[str, Row]:
    """All cases of one family."""
    name, cases = job
    family = next(family for family in FAMILIES if family.name == name)
    row: Row = {}
    for case in cases:
        units, training = CASES[case]
        outcome = check(family, training=training, units=units)
        row[case] = replace(outcome, reason=portable(outcome.reason), remark=portable(outcome.remark))
    return name, row


def portable(text: str) -> str:
    """A message without the folders of this machine."""
    return re.sub(r"/\S*/site-packages/", "", text).replace(f"{ROOT}/", "")


def progress(row: Row) -> str:
    """One line on a family."""
    first = row["eval"]
    parts = [f"{first.num_calls} units, {first.capture_s:.2f} s"]
    for case, outcome in row.items():
        parts.append(f"{case} " + ("passes" if outcome.passed else f"FAILS ({outcome.reason})"))
    return ", ".join(parts)


def rate(rows: dict[str, Row], case: str) -> str:
    """How many of the families pass."""
    passed = sum(row[case].passed for row in rows.values())
    return f"{passed} of {len(rows)} ({100 * passed / len(rows):.1f} %)"


def data(rows: dict[str, Row]) -> dict[str, Any]:
    """The same as the page, for programs."""
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


def stored() -> dict[str, Row]:
    """The rows of the table that is there."""
    families = json.loads(DATA.read_text(encoding="utf-8"))["families"]
    return {entry["name"]: {case: Outcome(**entry[case]) for case in CASES} for entry in families}


def page(rows: dict[str, Row]) -> str:
    """The page in the docs."""
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
        "# What capture was tried on",
        "",
        f"With automatic units **{rate(rows, 'eval')}** pass in eval mode and **{rate(rows, 'train')}** in train mode; "
        f"at leaf level {rate(rows, 'leaf eval')} and {rate(rows, 'leaf train')}.",
        "",
        f"{len(FAMILIES) - num_plain} models of {len(types)} transformers families and {num_plain} plain modules, all "
        f"tiny and with random weights; torch {torch.__version__}, transformers {transformers.__version__}. Each is "
        f"captured with a batch of {BATCH_SIZES[0]} and compared with the plain model at batches of "
        f"{', '.join(map(str, BATCH_SIZES))} from the same seed. *Passes* means: the outputs, in train mode also every "
        "parameter's gradient and every buffer, are equal to the last bit; capture left the model as it was; and three "
        "stages, each with a backward pass of its own as on separate workers, give the same outputs to the last "
        "bit and gradients within 1e-5 (an addition may have another order; "
        f"to the last bit, too, for {sum(outcome.stages_equal for outcome in automatic)} of {len(automatic)}). "
        f"`{'`, `'.join(refused)}` passes if capture refuses it and names the line.",
        "",
        f"Capture with automatic units takes {statistics.median(seconds):.2f} s (median), {max(seconds):.1f} s at "
        "most, on one core of a busy machine, after a first capture in the process.",
        "",
        "This page and `capture-families.json` are written by",
        "",
        "    python benchmarks/capture_families.py",
        "",
        "and `--only NAME` repeats one family. *Crossing* is what crosses the cut in the middle in eval mode: tensors "
        "and bytes for a batch of two. Seconds are for capture in eval mode. *Leaf* shows eval and train mode.",
        "",
    ]
    for group in dict.fromkeys(family.group for family in FAMILIES):
        lines += [f"## {group.capitalize()}", "", *table([one for one in FAMILIES if one.group == group], rows), ""]
    return "\n".join(lines)


def table(families: list[Family], rows: dict[str, Row]) -> list[str]:
    """One group as a table."""
    lines = [
        "| family | class | units | crossing | capture s | eval | train | leaf (units) | remark |",
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
    """Passed or not."""
    return "✓" if outcome.passed else "✗"


def remark(family: Family, row: Row) -> str:
    """The family's own remark, what was left out, and the reason of every failure."""
    found: dict[str, list[str]] = {}
    for case, outcome in row.items():
        if outcome.reason:
            found.setdefault(shortened(outcome.reason), []).append(case)
    parts = [part for part in (family.remark, row["eval"].remark, row["train"].remark) if part]
    parts += [f"{', '.join(cases)}: {reason}" for reason, cases in found.items()]
    return "; ".join(shortened(part) for part in dict.fromkeys(parts))


def shortened(text: str, most: int = 300) -> str:
    """A text that fits a table."""
    return text if len(text) <= most else text[: most - 1] + "…"


if __name__ == "__main__":
    sys.exit(main())
