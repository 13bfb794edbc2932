"""A benchmark's plans, each in a process of its own, some at once: what `shared_gpu` and `forecast_memory` have alike.

    options = apart_parser(__doc__).parse_args()
    run_apart(options, PLANS, measure, tell)     measure(about, device) ─► a dict, in the plan's own process
                                                 tell(about, found), here, one after another; {"error": …}: it failed

Speeds say nothing where workers share one device; most of a run is starting.
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

__all__ = ["apart_parser", "chosen_plans", "run_apart"]

About = dict[str, Any]


def apart_parser(about: str | None) -> argparse.ArgumentParser:
    """The options that both have."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--at-once", type=int, default=4, help="plans that run at the same time")
    parser.add_argument("--only", default="", help="numbers of plans with commas, from 0")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    return parser


def chosen_plans(options: argparse.Namespace, plans: Sequence[About]) -> Sequence[About]:
    """Those that `--only` names."""
    return [plans[int(one)] for one in options.only.split(",")] if options.only else plans


def run_apart(
    options: argparse.Namespace,
    plans: Sequence[About],
    measure: Callable[[About, str], About],
    tell: Callable[[About, About], None],
) -> None:
    """Run the chosen plans; in the process of one, that one. Ends the program where it is left out or done with one."""
    if options.one:
        print(json.dumps(measure(json.loads(options.one), options.device)))
        sys.exit()
    if options.device.startswith("cuda") and not has_gpu():
        print(f"left out: {options.device} is asked for, and there is no GPU here; --device cpu:0 tries it on a core")
        sys.exit()
    lock = threading.Lock()

    def run(about: About) -> None:
        command = [sys.executable, sys.argv[0], "--device", options.device, "--one", json.dumps(about)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = ended.stdout.strip().splitlines()
        found = json.loads(lines[-1]) if lines and not ended.returncode else {"error": ended.stderr[-1000:]}
        with lock:
            tell(about, found)

    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(run, chosen_plans(options, plans)))
