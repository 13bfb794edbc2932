"""``python -m stagewright …``: the command line.

Workers start often, so ``python -m stagewright worker`` does not import the command line's libraries: it needs only the
engine, and imports torch only after its device is pinned.
"""

from __future__ import annotations

import os
import sys

if sys.path[:1] in ([""], [os.getcwd()]):
    # `python -m` puts the current directory first, where a file called profile.py or queue.py would replace a module of
    # the standard library. `user_code` adds it behind the standard library when a plan names the user's code.
    del sys.path[0]

import argparse
from pathlib import Path

_OTHERS = {"-h", "--help", "--resume", "--data-dir", "--tokenizer"}  # options for which the command line is needed


def main() -> None:
    """Run a worker, or the command line."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["worker"] and not _OTHERS & set(arguments) and "SLURM_STEP_NUM_TASKS" not in os.environ:
        _run_worker(arguments[1:])
        return
    from stagewright.cli import main as command_line

    command_line()


def _run_worker(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="stagewright worker", add_help=False, allow_abbrev=False)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--run-folder", type=Path)  # not --run: torchrun would read that as its --run-path
    parser.add_argument("--job")
    parser.add_argument("--hang-s", "--timeout", type=float, default=300.0)
    options = parser.parse_args(arguments)
    from stagewright.engine.worker.worker import start_worker

    start_worker(options.plan, options.run_folder, options.job, options.hang_s)


if __name__ == "__main__":
    main()
