"""Seed bugs into distributed training scripts and let `stagewright verify` find them; count false alarms of right runs.

    python benchmarks/verify_bugs.py                      # everything, about an hour on two cores
    python benchmarks/verify_bugs.py --only accelerated   # cases whose script contains a word; updates their rows
    python benchmarks/verify_bugs.py --bugs, --right      # only the bugs, only the right runs

Tiny models on two processes with Gloo (four for one bug). Writes docs/verify-bugs.json and docs/verify-bugs.md.
Exits with code 3 if a bug is missed, if there are fewer than 18 right modules or 14 right causes, or if a right run
raises an alarm. The Accelerate cases need `pip install accelerate`, which the extra `peers` contains.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).parent / "verify"))

import torch  # noqa: E402

torch.set_num_threads(1)

from cases import BUGS, RIGHT, Case  # noqa: E402
from run import run_cases  # noqa: E402

from stagewright.verification.verdict import Verdict  # noqa: E402

DATA, PAGE = ROOT / "docs" / "verify-bugs.json", ROOT / "docs" / "verify-bugs.md"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[""])
    parser.add_argument("--bugs", action="store_true")
    parser.add_argument("--right", action="store_true")
    options = parser.parse_args()
    known: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {"bugs": {}, "right": {}}
    for kind, cases in (("bugs", BUGS), ("right", RIGHT)):
        if (options.bugs or options.right) and not getattr(options, kind):
            continue
        chosen = [case for case in cases if any(word in case.script for word in options.only)]
        if importlib.util.find_spec("accelerate") is None:
            chosen = [case for case in chosen if not case.script.startswith("accelerated")]
        with tempfile.TemporaryDirectory() as scratch:
            for case, verdict in zip(chosen, run_cases(chosen, Path(scratch)), strict=True):
                row = bug_row(case, verdict) if kind == "bugs" else right_row(case, verdict)
                if "error" not in row:  # otherwise its script did not run: no result
                    known[kind][_label(case)] = row
                print(_label(case), row, flush=True)
    order = {_label(case): index for index, case in enumerate((*BUGS, *RIGHT))}
    for kind in ("bugs", "right"):
        rows = {name: row for name, row in known[kind].items() if name in order}
        known[kind] = dict(sorted(rows.items(), key=lambda item: order[item[0]]))
    known["machine"] = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
    )
    known["totals"] = totals(known)
    DATA.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(known), encoding="utf-8")
    print(known["totals"])
    missing = [name for name in order if name not in known["bugs"] and name not in known["right"]]
    print(f"{len(missing)} cases have no result yet")
    sys.exit(0 if passes(known) else 3)


def _label(case: Case) -> str:
    setting = case.setting
    return case.name if case.bug else f"{case.name}, seed {setting.seed}, {setting.dtype}"


def bug_row(case: Case, verdict: Verdict | str) -> dict[str, Any]:
    """Return what was found of a bug."""
    row: dict[str, Any] = {"script": case.script, "bug": case.bug, "stock": case.stock}
    if isinstance(verdict, str):
        return {**row, "found": False, "error": verdict}
    cause = verdict.cause.name if verdict.cause else ""
    return {
        **row,
        "found": not verdict.same,
        "phase": next(iter(verdict.first), ""),
        "module": verdict.module,
        "module_right": verdict.module in case.module,
        "cause": cause or verdict.problem[:160],
        "cause_right": cause in case.cause,
    }


def right_row(case: Case, verdict: Verdict | str) -> dict[str, Any]:
    """Return how far a right run was from an alarm."""
    row: dict[str, Any] = {"script": case.script, "dtype": case.setting.dtype, "seed": case.setting.seed}
    if isinstance(verdict, str):
        return {**row, "alarm": None, "error": verdict}
    ratio = max((tensor.error / tensor.tolerance for tensor in verdict.tensors if tensor.tolerance), default=0.0)
    summary = [] if verdict.same else verdict.summary()
    return {**row, "alarm": not verdict.same, "tensors": len(verdict.tensors), "ratio": ratio, "summary": summary}


def totals(known: dict[str, Any]) -> dict[str, int]:
    """Count both tables."""
    bugs, right = known["bugs"].values(), known["right"].values()
    return {
        "bugs": len(bugs),
        "found": sum(row["found"] for row in bugs),
        "module_right": sum(row.get("module_right", False) for row in bugs),
        "cause_right": sum(row.get("cause_right", False) for row in bugs),
        "right_runs": sum(row["alarm"] is not None for row in right),
        "alarms": sum(bool(row["alarm"]) for row in right),
    }


def passes(known: dict[str, Any]) -> bool:
    """Whether the thresholds hold."""
    count = known["totals"]
    enough = count["module_right"] >= 18 and count["cause_right"] >= 14
    return count["found"] == count["bugs"] and enough and count["alarms"] == 0


def page(known: dict[str, Any]) -> str:
    """Return the page of both tables."""
    count = known["totals"]
    lines = [
        "# Bugs that verify finds",
        "",
        "Bugs seeded into training scripts of tiny models on two processes with Gloo, and what",
        "[`stagewright verify`](how-to/wrong-loss.md) says about them.",
        "*stock*: a bug of torch itself, which the script only uses.",
        "This page and `verify-bugs.json` are generated by `python benchmarks/verify_bugs.py`",
        f"({known['machine']}).",
        "",
        f"{count['found']} of {count['bugs']} bugs are found, the first wrong module is right in "
        f"{count['module_right']}, the cause in {count['cause_right']}. "
        f"{count['alarms']} of {count['right_runs']} right runs raise an alarm.",
        "",
        "## Bugs",
        "",
        "| script | bug | phase | first wrong module | right | cause | right |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in known["bugs"].values():
        module = "(the model)" if row.get("module") == "" else row.get("module") or "–"
        cells = (
            row["script"],
            row["bug"] + (" (stock)" if row["stock"] else ""),
            row.get("phase", "not found"),
            f"`{module}`",
            "yes" if row.get("module_right") else "no",
            _plain(row.get("cause") or "–"),
            "yes" if row.get("cause_right") else "no",
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Right runs",
        "",
        "The largest error of any tensor, relative to its tolerance; above 1 it would be an alarm.",
        "Settings (padding, tied weights, dropout, clipping, AdamW, micro-batches, strided samplers) change",
        "with the seed.",
        "",
        "| script | dtype | runs | alarms | largest error / tolerance |",
        "|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in known["right"].values():
        if row["alarm"] is not None:
            groups.setdefault((row["script"], row["dtype"]), []).append(row)
    for (script, dtype), rows in groups.items():
        ratio = max(row["ratio"] for row in rows)
        lines.append(f"| {script} | {dtype} | {len(rows)} | {sum(row['alarm'] for row in rows)} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    return text.replace("|", " ").replace("<", "(").replace(">", ")").replace("[", "(").replace("]", ")")


if __name__ == "__main__":
    main()
