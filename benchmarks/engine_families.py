"""Run every model family under each strategy and verify it against the single-device baseline.

    python benchmarks/engine_families.py                    # all; writes the page and the JSON
    python benchmarks/engine_families.py --only bert gpt2   # some, printed only; --update writes them into the page
    python benchmarks/engine_families.py --at-once 8        # plans at the same time, each on two separate cores
    python benchmarks/engine_families.py --log log.jsonl    # append each result as it comes
    python benchmarks/engine_families.py --add log.jsonl    # add the results that an interrupted run printed
    python benchmarks/engine_families.py --older-than 2026-11-18 --limit 500 --skip log.jsonl
        # only cells measured before that day that the log has not; start none after 500 s

The batch of nine samples divides unevenly, so replicas and micro-batches have different sizes. Times mean nothing.
Exits with code 3 if a plan fails, or fails the parity check; plans refused with a reason do not count.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import sys
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from capture_families import folded, strip_paths
from families import FAMILIES, Family
from families.sweep import Cell, Result, answer_cells, read_lines, run_cells
from record import machine_text

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "engine-families.md"
DATA = ROOT / "docs" / "engine-families.json"
BATCH = 9
PLANS: dict[str, dict[str, Any]] = {
    "pipeline": {"mesh": "pipeline=3", "microbatches": 4},
    "zero-bubble": {
        "mesh": "pipeline=2",
        "microbatches": 4,
        "schedule": "interleaved-zero-bubble",
        "recompute": "always",
        "clip": 0.1,
    },
    "data": {"mesh": "data=2", "clip": 0.1},
    "sharded": {"mesh": "data=2", "shard": True},
    "tensor": {"mesh": "tensor=2"},
    "stream": {"mesh": "pipeline=2", "microbatches": 4, "training": False},
}
"""The plan of each column."""
TITLES = {"sharded": "FSDP", "stream": "inference"}
"""Column headings that differ from the plan's name."""


def main() -> int:
    """Run the sweep and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these families; nothing is written")
    parser.add_argument("--update", action="store_true", help="with --only: update their rows of the page")
    parser.add_argument("--plans", nargs="+", metavar="NAME", choices=list(PLANS), help="only these columns")
    parser.add_argument("--at-once", type=int, default=1, help="plans that run at the same time")
    parser.add_argument("--add", nargs="+", type=Path, metavar="FILE", help="add printed results, run here before")
    parser.add_argument("--log", type=Path, metavar="FILE", help="append each result to this file")
    parser.add_argument("--older-than", metavar="DATE", help="only cells of the page measured before this day")
    parser.add_argument("--skip", nargs="+", type=Path, metavar="FILE", help="no cells that these logs have")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="start no cell after this time")
    parser.add_argument("--slot", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = [family.name for family in FAMILIES]
    unknown = sorted(set(options.only or ()) - set(names))
    if unknown:
        parser.error(f"unknown family {unknown[0]!r}; known: {', '.join(names)}")
    if options.slot is not None:
        run_slot(options.slot)
        return 0
    cells = select_cells(options)
    whole = len(cells) == len(names) * len(PLANS) and options.limit is None
    rows = read_results(options.add) if options.add else run_all(cells, options)
    if options.add or options.update or whole:
        old_rows = load_rows() if options.add or options.update else {}
        rows = old_rows | {name: old_rows.get(name, {}) | row for name, row in rows.items()}
        content = data(rows)
        DATA.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(content), encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)} and {DATA.relative_to(ROOT)}")
    results = [result for row in rows.values() for result in row.values()]
    return 3 if any(result["verdict"] in ("differs", "failed") for result in results) else 0


def select_cells(options: argparse.Namespace) -> list[Cell]:
    """Return the cells that the options name, in the page's order."""
    done = {cell for cell, _ in read_lines(options.skip or ())}
    old_rows = load_rows() if options.older_than else {}
    return [
        (family.name, plan)
        for family in FAMILIES
        for plan in PLANS
        if (not options.only or family.name in options.only)
        and (not options.plans or plan in options.plans)
        and (family.name, plan) not in done
        and (not options.older_than or old_rows[family.name][plan]["run"] < options.older_than)
    ]


def run_all(cells: list[Cell], options: argparse.Namespace) -> dict[str, dict[str, Result]]:
    """Run each slot in a separate process on separate cores, and log each result as it comes."""
    rows: dict[str, dict[str, Result]] = {name: {} for name, _ in cells}

    def report(result: Result) -> None:
        line = json.dumps(result)
        print(line, flush=True)
        if options.log:
            with options.log.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        rows[result.pop("family")][result.pop("plan")] = result

    slots = [[sys.executable, __file__, "--slot", str(slot)] for slot in range(options.at_once)]
    run_cells(cells, slots, report, options.limit)
    return rows


def read_results(paths: list[Path]) -> dict[str, dict[str, Result]]:
    """Read results as they were printed, one per line."""
    rows: dict[str, dict[str, Result]] = {}
    for (family, plan), result in read_lines(paths):
        rows.setdefault(family, {})[plan] = {"run": this_run(), **result}
    return rows


@functools.cache
def this_run() -> str:
    """Describe when and where a result is measured."""
    import torch
    import transformers

    processor = machine_text().partition(";")[0]
    return (
        f"{datetime.now(UTC):%Y-%m-%d}; {processor}; torch {torch.__version__}, transformers {transformers.__version__}"
    )


def run_slot(slot: int) -> None:
    """Run the plans that standard input names, one after the other, on two cores."""
    cores = sorted(os.sched_getaffinity(0))
    own_cores = [cores[(2 * slot + index) % len(cores)] for index in range(2)]
    answer_cells(lambda name, plan: {"run": this_run(), **check_plan(name, PLANS[plan], own_cores)})


def check_plan(name: str, settings: dict[str, Any], cores: list[int]) -> Result:
    """Run one plan of one family and check parity."""
    from stagewright.engine.jobs.compare import run_plan
    from stagewright.errors import StagewrightError, UsageError
    from stagewright.spec.plan import Mesh, ModelSpec, Plan

    mesh = Mesh.parse(settings["mesh"])
    plan = Plan(
        model=ModelSpec(name=f"families.factory:{name.replace('-', '_')}"),
        batch=BATCH,
        mesh=mesh,
        steps=1,
        warmup=0,
        devices=tuple(f"cpu:{cores[rank % len(cores)]}" for rank in range(mesh.num_workers)),
        **{key: value for key, value in settings.items() if key != "mesh"},
    )
    with tempfile.TemporaryDirectory() as root:
        try:
            parity = run_plan(plan, root, hang_s=120).to_dict()["equality"]
        except StagewrightError as error:
            verdict = "refused" if isinstance(error, UsageError) else "failed"
            return {"verdict": verdict, "reason": strip_paths(str(error).splitlines()[0])}
    largest = max(parity[kind] for kind in ("loss", "outputs", "gradients", "buffers", "updates"))
    return {
        "verdict": "equal" if parity["equal"] else "differs",
        "reason": "" if parity["equal"] else parity["worst"],
        "difference": largest,
        "tolerance": parity["tolerance"],
    }


def load_rows() -> dict[str, dict[str, Result]]:
    """Load the rows of the existing page."""
    return {entry["name"]: entry["plans"] for entry in json.loads(DATA.read_text(encoding="utf-8"))["families"]}


def data(rows: dict[str, dict[str, Result]]) -> dict[str, Any]:
    """Return the page's data as JSON values."""
    return {
        "plans": PLANS,
        "families": [
            {"name": family.name, "group": family.group, "class": family.model_class, "plans": rows[family.name]}
            for family in FAMILIES
            if family.name in rows
        ],
    }


def page(data: dict[str, Any]) -> str:
    """Write the page."""
    rows = {entry["name"]: entry["plans"] for entry in data["families"]}
    results = [result for row in rows.values() for result in row.values()]
    verdicts = Counter(result["verdict"] for result in results)
    num_exact = sum(result.get("difference") == 0 for result in results)
    num_wide = sum(result["verdict"] == "equal" and result["tolerance"] > 1e-5 for result in results)
    lines = [
        "# Models tested with the engine",
        "",
        f"{len(rows)} models under six plans each, run by worker processes and verified against the single-device "
        f"baseline: **{verdicts['equal']} pass the parity check, {verdicts['differs']} differ, {verdicts['failed']} "
        f"fail**, {verdicts['refused']} are refused with a reason. {num_exact} of those that pass are bit-identical; "
        f"{num_wide} need a tolerance above 1e-5, within the rounding sensitivity of the same tensor in the baseline "
        "([details](compare.md#parity-check)).",
        "",
        f"The models are those of [capture](capture-families.md), with a batch of {BATCH} samples in float32. Loss, "
        "outputs, all gradients, buffers and parameter updates are compared. The plans:",
        "",
        *(f"- **{TITLES.get(name, name)}**: {describe(settings)}" for name, settings in PLANS.items()),
        "",
        *runs(rows),
        "",
        "This page and `engine-families.json` are generated by",
        "",
        "    python benchmarks/engine_families.py",
        "",
        "`--only NAME` repeats one family. Cells are the max relative error; – means refused, with the reason below "
        "the table.",
        "",
    ]
    for group in dict.fromkeys(family.group for family in FAMILIES):
        families = [family for family in FAMILIES if family.group == group and family.name in rows]
        shown = [*table(families, rows), "", *reasons(families, rows)]
        lines += [f"## {group.capitalize()}", "", *folded(f"{len(families)} models", shown)]
    return "\n".join(lines)


def runs(rows: dict[str, dict[str, Result]]) -> list[str]:
    """List the runs that the results are from, with the number of results of each plan."""
    counts: dict[str, Counter[str]] = {}
    for row in rows.values():
        for plan, result in row.items():
            counts.setdefault(result["run"], Counter())[TITLES.get(plan, plan)] += 1
    lines = [
        f"- {run}: " + ", ".join(f"{plan} of {num} models" for plan, num in sorted(of_plan.items()))
        for run, of_plan in sorted(counts.items())
    ]
    return ["The results were measured in these runs; each cell is the latest one of its model and plan:", "", *lines]


def describe(settings: dict[str, Any]) -> str:
    """Describe a plan in words."""
    words = [f"`{settings['mesh']}`"]
    words += [f"{settings['microbatches']} micro-batches"] if "microbatches" in settings else []
    words += [settings["schedule"]] if "schedule" in settings else []
    words += ["activation checkpointing"] if "recompute" in settings else []
    words += ["FSDP2"] if settings.get("shard") else []
    words += [f"gradients clipped to {settings['clip']}"] if "clip" in settings else []
    words += ["inference on a stream of batches"] if settings.get("training") is False else []
    return ", ".join(words)


def table(families: list[Family], rows: dict[str, dict[str, Result]]) -> list[str]:
    """Write one group as a table."""
    head = [TITLES.get(name, name) for name in PLANS]
    lines = [f"| family | {' | '.join(head)} |", f"|---|{':-:|' * len(PLANS)}"]
    for family in families:
        cells = [mark(rows[family.name].get(plan)) for plan in PLANS]
        lines.append(f"| {family.name} | {' | '.join(cells)} |")
    return lines


def mark(result: Result | None) -> str:
    """Format a cell."""
    if result is None:
        return ""
    if result["verdict"] == "equal":
        return "0" if result["difference"] == 0 else f"{result['difference']:.0e}"
    return "–" if result["verdict"] == "refused" else f"✗ {result['verdict']}"


def reasons(families: list[Family], rows: dict[str, dict[str, Result]]) -> list[str]:
    """List each reason once, with the families and plans that it applies to."""
    names_of_reason: dict[str, list[str]] = {}
    for family in families:
        for plan in PLANS:
            result = rows[family.name].get(plan)
            if result is not None and result["reason"]:
                name = f"{family.name} ({TITLES.get(plan, plan)})"
                names_of_reason.setdefault(shorten(result["reason"]), []).append(name)
    lines = [f"- {', '.join(names)}: {reason}" for reason, names in names_of_reason.items()]
    return [*lines, ""] if lines else []


def shorten(reason: str) -> str:
    """Remove the worker and the model's class from a reason."""
    text = reason.split(" refused: ", 1)[-1]
    return re.sub(r"can't (split|capture) \w+", r"can't \1 it", text).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
