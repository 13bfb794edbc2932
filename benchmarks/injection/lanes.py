"""Several faults at once: each lane is a process with cores of its own that takes one fault after the other.

main process ── fault, as a JSON line ──► lane 0 (cores 0, 1)    imports torch once; its workers are forked
             ◄── row, as a JSON line ───  lane 1 (cores 2, 3) …
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

from injection import BENCHMARKS, inject
from stagewright.engine.launch import fork_server

NumberedFault: TypeAlias = dict[str, Any]


def share_cores(cores: Sequence[int], num_lanes: int) -> list[list[int]]:
    """Divide cores into disjoint shares of at least one; there are no more lanes than cores.

    >>> share_cores(range(5), 2), share_cores(range(2), 3)
    ([[0, 1], [2, 3, 4]], [[0], [1]])
    """
    num_lanes = min(num_lanes, len(cores))
    bounds = [len(cores) * lane // num_lanes for lane in range(num_lanes + 1)]
    return [list(cores[low:high]) for low, high in itertools.pairwise(bounds)]


def run_lanes(
    faults: Sequence[NumberedFault],
    num_lanes: int,
    hang_s: float,
    references: Path,
    on_row: Callable[[dict[str, Any]], None],
    is_over: Callable[[], bool],
) -> None:
    """Run faults, ``num_lanes`` at once; ``on_row`` is called with each row. Begin none when ``is_over``."""
    waiting, lock = list(reversed(faults)), threading.Lock()

    def serve(cores: list[int]) -> None:
        lane: subprocess.Popen[str] | None = None
        while True:
            with lock:
                if not waiting or is_over():
                    break
                fault = waiting.pop()
            if lane is None:
                lane = _start_lane(cores, hang_s, references)
            assert lane.stdin is not None
            assert lane.stdout is not None
            lane.stdin.write(json.dumps(fault) + "\n")
            lane.stdin.flush()
            line = lane.stdout.readline()
            if line:
                with lock:
                    on_row(json.loads(line))
            else:  # the harness failed, so nothing is known about the fault
                lane.communicate()
                print(f"fault {fault['number']}: its lane ended with exit code {lane.returncode}", file=sys.stderr)
                lane = None
        if lane is not None:
            lane.communicate()

    cores = sorted(os.sched_getaffinity(0))
    threads = [threading.Thread(target=serve, args=(share,)) for share in share_cores(cores, num_lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _start_lane(cores: list[int], hang_s: float, references: Path) -> subprocess.Popen[str]:
    told = json.dumps({"cores": cores, "hang_s": hang_s, "references": str(references)})
    command = [sys.executable, str(BENCHMARKS / "faults.py"), "--lane", told]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run_lane(told: dict[str, Any]) -> None:
    """Take faults from standard input until it is closed, and write their rows."""
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    os.sched_setaffinity(0, told["cores"])
    fork_server._PRELOADED += ("sklearn.datasets",)  # the task's, which each worker would import otherwise
    fork_server.start_fork_server()
    for line in sys.stdin:
        fault = json.loads(line)
        _write(rows, {**fault, **inject(fault, told["hang_s"], Path(told["references"]))})


def _write(file: IO[str], row: dict[str, Any]) -> None:
    file.write(json.dumps(row) + "\n")
    file.flush()
