"""``python -m stagewright …``: the command line.

Workers are many and start often, so ``python -m stagewright worker`` does not go through the command line's libraries:
it needs nothing but what the engine needs, and imports torch only after its device is pinned.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

__all__ = ["main"]


def main() -> None:
    """Run a worker, or the command line."""
    words = sys.argv[1:]
    if words[:1] == ["worker"] and not {"-h", "--help"} & set(words):
        _worker(words[1:])
        return
    from stagewright.cli import main as command_line

    command_line()


def _worker(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="stagewright worker", add_help=False, allow_abbrev=False)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--run-folder", type=Path)  # not --run: torchrun would take that for its own --run-path
    parser.add_argument("--job")
    parser.add_argument("--hang-s", type=float)
    given = parser.parse_args(words)
    from stagewright.engine.worker.worker import start_worker

    start_worker(given.plan, given.run_folder, given.job, given.hang_s)


if __name__ == "__main__":
    main()
