"""Run every family under each strategy, for real, and prove it equal to serial.

    python benchmarks/engine_families.py                    # all; writes the table and the JSON
    python benchmarks/engine_families.py --only bert gpt2   # some, printed only; --update puts them into the table
    python benchmarks/engine_families.py --at-once 8        # plans at the same time, each on two cores of its own

Nine samples, so that nothing divides: replicas and micro-batches have different sizes. Times say nothing. Exits with 3
if a plan runs and is not equal, or fails; explain_oom with a reason do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from capture_families import portable
from families import FAMILIES, Family

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
"""What the columns of the table run."""

Found = dict[str, Any]


def main() -> int:
    """Run the sweep; the exit code says whether everything that ran is equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these families; nothing is written")
    parser.add_argument("--update", action="store_true", help="with --only: put these into the table that is there")
    parser.add_argument("--plans", nargs="+", metavar="NAME", choices=list(PLANS), help="only these columns")
    parser.add_argument("--at-once", type=int, default=1, help="plans that run at the same time")
    parser.add_argument("--slot", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = [family.name for family in FAMILIES]
    unknown = sorted(set(options.only or ()) - set(names))
    if unknown:
        parser.error(f"unknown family {unknown[0]!r}; known: {', '.join(names)}")
    wanted = [name for name in names if not options.only or name in options.only]
    if options.slot is not None:
        for found in run_some(wanted[options.slot :: options.at_once], options.plans or list(PLANS), options.slot):
            print(json.dumps(found), flush=True)
        return 0
    rows = run_all(wanted, options.plans or list(PLANS), options.at_once)
    if options.update or not (options.only or options.plans):
        before = stored() if options.update else {}
        rows = before | {name: before.get(name, {}) | row for name, row in rows.items()}
        found = data(rows)
        DATA.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(found), encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)} and {DATA.relative_to(ROOT)}")
    every = [found for row in rows.values() for found in row.values()]
    return 3 if any(found["verdict"] in ("differs", "failed") for found in every) else 0


def run_all(names: list[str], plans: list[str], at_once: int) -> dict[str, dict[str, Found]]:
    """Each slot in a process of its own, on cores of its own."""
    rows: dict[str, dict[str, Found]] = {name: {} for name in names}
    lock = threading.Lock()

    def follow(slot: int) -> None:
        command = [sys.executable, __file__, "--slot", str(slot), "--at-once", str(at_once)]
        command += ["--only", *names, "--plans", *plans]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                found = json.loads(line)
                with lock:
                    rows[found.pop("family")][found.pop("plan")] = found
                    print(line.strip(), flush=True)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(follow, range(at_once)))
    return rows


def run_some(names: list[str], plans: list[str], slot: int) -> Iterator[Found]:
    """All plans of some families, one after the other."""
    cores = sorted(os.sched_getaffinity(0))
    own = [cores[(2 * slot + at) % len(cores)] for at in range(2)]
    for name in names:
        for plan in plans:
            yield {"family": name, "plan": plan, **prove(name, PLANS[plan], own)}


def prove(name: str, about: dict[str, Any], cores: list[int]) -> Found:
    """One plan of one family."""
    from stagewright.engine.jobs.compare import run_plan
    from stagewright.errors import StagewrightError, UsageError
    from stagewright.spec.plan import Mesh, ModelSpec, Plan

    mesh = Mesh.parse(about["mesh"])
    plan = Plan(
        model=ModelSpec(name=f"families.factory:{name}"),
        batch=BATCH,
        mesh=mesh,
        steps=1,
        warmup=0,
        devices=tuple(f"cpu:{cores[at % len(cores)]}" for at in range(mesh.num_workers)),
        **{key: value for key, value in about.items() if key != "mesh"},
    )
    with tempfile.TemporaryDirectory() as root:
        try:
            equality = run_plan(plan, root, hang_s=120).to_dict()["equality"]
        except StagewrightError as error:
            verdict = "refused" if isinstance(error, UsageError) else "failed"
            return {"verdict": verdict, "reason": portable(str(error).splitlines()[0])}
    largest = max(equality[kind] for kind in ("loss", "outputs", "gradients", "buffers", "updates"))
    return {
        "verdict": "equal" if equality["equal"] else "differs",
        "reason": "" if equality["equal"] else equality["worst"],
        "difference": largest,
        "tolerance": equality["tolerance"],
    }


def stored() -> dict[str, dict[str, Found]]:
    """The rows of the table that is there."""
    return {entry["name"]: entry["plans"] for entry in json.loads(DATA.read_text(encoding="utf-8"))["families"]}


def data(rows: dict[str, dict[str, Found]]) -> dict[str, Any]:
    """The same as the page, for programs."""
    import torch
    import transformers

    return {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "plans": PLANS,
        "families": [
            {"name": family.name, "group": family.group, "class": family.model_class, "plans": rows[family.name]}
            for family in FAMILIES
            if family.name in rows
        ],
    }


def page(data: dict[str, Any]) -> str:
    """The page in the docs."""
    rows = {entry["name"]: entry["plans"] for entry in data["families"]}
    versions = data["versions"]
    every = [found for row in rows.values() for found in row.values()]
    count = {kind: sum(one["verdict"] == kind for one in every) for kind in ("equal", "refused", "differs", "failed")}
    exact = sum(one.get("difference") == 0 for one in every)
    wide = sum(one["verdict"] == "equal" and one["tolerance"] > 1e-5 for one in every)
    tried = f"{len(rows)} models under six plans each, run by worker processes and compared with serial"
    lines = [
        "# What the engine was tried on",
        "",
        f"{tried}: **{count['equal']} are equal, {count['differs']} differ, {count['failed']} failed**, "
        f"{count['refused']} were refused with the reason. {exact} of the equal ones are so to the last bit; {wide} "
        "needed more than 1e-5, as much as rounding alone does to the same tensor of serial "
        "([why](compare.md#parity-check)).",
        "",
        f"The same tiny models as on [the page of capture](capture-families.md), with {BATCH} samples in a step, in "
        f"float32; torch {versions['torch']}, transformers {versions['transformers']}. Loss, results, every gradient, "
        "every buffer and what the optimiser makes of it are compared. The plans:",
        "",
        *(f"- **{name}**: {describe(about)}" for name, about in PLANS.items()),
        "",
        "This page and `engine-families.json` are written by",
        "",
        "    python benchmarks/engine_families.py",
        "",
        "and `--only NAME` repeats one family. – is refused, with the reason below the table; *1e-07* is the largest "
        "relative difference.",
        "",
    ]
    for group in dict.fromkeys(family.group for family in FAMILIES):
        families = [one for one in FAMILIES if one.group == group and one.name in rows]
        lines += [f"## {group.capitalize()}", "", *table(families, rows), "", *reasons(families, rows)]
    return "\n".join(lines)


def describe(about: dict[str, Any]) -> str:
    """A plan in words."""
    words = [f"`{about['mesh']}`"]
    words += [f"{about['microbatches']} micro-batches"] if "microbatches" in about else []
    words += [about["schedule"]] if "schedule" in about else []
    words += ["recomputed"] if "recompute" in about else []
    words += ["FSDP2"] if about.get("shard") else []
    words += [f"clipped to {about['clip']}"] if "clip" in about else []
    words += ["inference, as a stream"] if about.get("training") is False else []
    return ", ".join(words)


def table(families: list[Family], rows: dict[str, dict[str, Found]]) -> list[str]:
    """One group as a table."""
    lines = [f"| family | {' | '.join(PLANS)} |", f"|---|{':-:|' * len(PLANS)}"]
    for family in families:
        cells = [mark(rows[family.name].get(plan)) for plan in PLANS]
        lines.append(f"| {family.name} | {' | '.join(cells)} |")
    return lines


def mark(found: Found | None) -> str:
    """A cell."""
    if found is None:
        return ""
    if found["verdict"] == "equal":
        return "0" if found["difference"] == 0 else f"{found['difference']:.0e}"
    return "–" if found["verdict"] == "refused" else f"✗ {found['verdict']}"


def reasons(families: list[Family], rows: dict[str, dict[str, Found]]) -> list[str]:
    """Below a table: each reason once, with those that it is about."""
    about: dict[str, list[str]] = {}
    for family in families:
        for plan in PLANS:
            found = rows[family.name].get(plan)
            if found is not None and found["reason"]:
                about.setdefault(shortened(found["reason"]), []).append(f"{family.name} ({plan})")
    lines = [f"- {', '.join(names)}: {reason}" for reason, names in about.items()]
    return [*lines, ""] if lines else []


def shortened(reason: str) -> str:
    """Without which worker said it and which class it is about."""
    text = reason.split(" refused: ", 1)[-1]
    return re.sub(r"can't (split|capture) \w+", r"can't \1 it", text).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
