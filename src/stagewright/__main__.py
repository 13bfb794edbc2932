"""``python -m stagewright …``: the command line.

Workers are many and start often, so ``python -m stagewright worker`` does not go through the command line's libraries:
it needs nothing but what the engine needs, and imports torch only after its device is pinned.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

__all__ = ["main", "start_worker"]


def main() -> None:
    """Run a worker, or the command line."""
    words = sys.argv[1:]
    if words[:1] == ["worker"] and not {"-h", "--help"} & set(words):
        _worker(words[1:])
        return
    from stagewright.cli import main as command_line

    command_line()


def start_worker(plan: Path, run_folder: Path | None, job: str | None, hang_s: float | None) -> None:
    """Run this worker; whatever fails ends the process with one message, without waiting for stuck threads."""
    from stagewright.errors import StagewrightError

    def end(error: StagewrightError) -> None:
        print(f"stagewright: {error}", file=sys.stderr, flush=True)  # noqa: T201
        sys.stdout.flush()
        os._exit(error.exit_code)

    try:
        from stagewright.engine.watch import HANG_S
        from stagewright.engine.worker import run_worker

        run_worker(plan, run_folder, job=job, hang_s=HANG_S if hang_s is None else hang_s, end=end)
    except StagewrightError as error:
        end(error)


def _worker(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="stagewright worker", add_help=False, allow_abbrev=False)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--run-folder", type=Path)  # not --run: torchrun would take that for its own --run-path
    parser.add_argument("--job")
    parser.add_argument("--hang-s", type=float)
    given = parser.parse_args(words)
    start_worker(given.plan, given.run_folder, given.job, given.hang_s)


if __name__ == "__main__":
    main()
