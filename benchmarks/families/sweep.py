"""Run cells of a table, each a family and a plan, in several processes, and write each result as it comes.

A process reads a cell as a JSON line from its standard input and answers with a JSON line. Cells are given out one at
a time, so a slow one delays only its process, and a sweep that is stopped keeps what it has measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

__all__ = ["Cell", "Result", "answer_cells", "read_lines", "run_cells"]

Cell = tuple[str, str]
"""A family and a plan."""
Result = dict[str, Any]


def run_cells(
    cells: Iterable[Cell], commands: Sequence[Sequence[str]], report: Callable[[Result], None], limit_s: float | None
) -> None:
    """Run the cells, one process for each command, and start none after the limit.

    A process that ends in a cell is replaced; the cell has no result then.
    """
    pending = deque(cells)
    deadline = float("inf") if limit_s is None else time.monotonic() + limit_s
    lock = threading.Lock()

    def follow(command: Sequence[str]) -> None:
        while pending and time.monotonic() < deadline:
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            ) as process:
                feed(process)

    def feed(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        while time.monotonic() < deadline:
            with lock:
                if not pending:
                    return
                cell = pending.popleft()
            process.stdin.write(json.dumps(cell) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                print(f"{cell[0]} ({cell[1]}): the process ended with code {process.wait()}", file=sys.stderr)
                return
            with lock:
                report(json.loads(line))

    with ThreadPoolExecutor(max(len(commands), 1)) as pool:
        list(pool.map(follow, commands))
    if pending:
        print(f"{len(pending)} cells were not run within {limit_s:.0f} s", file=sys.stderr)


def answer_cells(run: Callable[[str, str], Result]) -> None:
    """Run the cells that standard input names, until it ends."""
    for line in sys.stdin:
        family, plan = json.loads(line)
        print(json.dumps({"family": family, "plan": plan, **run(family, plan)}), flush=True)


def read_lines(paths: Iterable[Path]) -> Iterator[tuple[Cell, Result]]:
    """Read results as they were printed, one per line."""
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            result = json.loads(line)
            yield (result.pop("family"), result.pop("plan")), result
