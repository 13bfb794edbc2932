"""Plans of a benchmark, each in a separate process, several at a time; for `shared_gpu` and `forecast_memory`.

    options = isolated_parser(__doc__).parse_args()
    run_isolated(options, PLANS, measure, report)     measure(settings, device) ─► a dict, in the plan's own process
                                                      report(settings, result), here, serially; failed: {"error": …}

Workers share one device, so speeds mean nothing; most of a run is start-up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from stagewright.cluster.device import has_gpu

__all__ = ["chosen_plans", "isolated_parser", "run_isolated"]

Settings = dict[str, Any]
Result = dict[str, Any]


def isolated_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the common options."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--at-once", type=int, default=4, help="plans that run at the same time")
    parser.add_argument("--only", default="", help="indices of plans, comma-separated, from 0")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    return parser


def chosen_plans(options: argparse.Namespace, plans: Sequence[Settings]) -> Sequence[Settings]:
    """Return the plans that `--only` names."""
    return [plans[int(index)] for index in options.only.split(",")] if options.only else plans


def run_isolated(
    options: argparse.Namespace,
    plans: Sequence[Settings],
    measure: Callable[[Settings, str], Result],
    report: Callable[[Settings, Result], None],
) -> None:
    """Run the chosen plans; in the process of one plan, run that one and exit. Exits also without the GPU it needs."""
    if options.one:
        print(json.dumps(measure(json.loads(options.one), options.device)))
        sys.exit()
    if options.device.startswith("cuda") and not has_gpu():
        print(f"skipped: {options.device} needs a GPU, and there is none here; --device cpu:0 tests it on a core")
        sys.exit()
    lock = threading.Lock()

    def run(settings: Settings) -> None:
        command = [sys.executable, sys.argv[0], "--device", options.device, "--one", json.dumps(settings)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = process.stdout.strip().splitlines()
        result = json.loads(lines[-1]) if lines and not process.returncode else {"error": process.stderr[-1000:]}
        with lock:
            report(settings, result)

    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(run, chosen_plans(options, plans)))
