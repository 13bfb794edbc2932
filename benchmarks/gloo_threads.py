"""Cost of Gloo's threads for a pinned worker: all-reduces and P2P messages with default and SCHED_BATCH threads.

    python benchmarks/gloo_threads.py

Two workers, one core each, compute for a moment before every operation, as layers do. The same processes alternate
between two process groups; one is created normally, the other inside `sched_batch_threads`
(`stagewright/machine/gloo_threads.py`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from record import write_record
from two_workers import run_two

SIZES_BYTES = (8, 16 << 10, 256 << 10, 1 << 20, 8 << 20)
MESSAGE_BYTES = 768 << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=150, help="rounds of each size")
    parser.add_argument("--output", default=None, help="JSON file")
    options = parser.parse_args()
    rows, _ = run_two(work, options.rounds)
    for row in rows:
        default, batch = (statistics.median(row[name]) for name in ("plain_s", "patient_s"))
        text = f"{default * 1e3:.2f} ms, {batch * 1e3:.2f} ms with SCHED_BATCH threads"
        print(f"{row['kind']} of {row['bytes']} bytes: {text}")
    if options.output:
        write_record(options.output, {"rows": rows})


def work(rank: int, rounds: int) -> list[dict[str, Any]]:
    """Run one worker, and return its times."""
    import torch
    import torch.distributed as dist

    from stagewright.machine.gloo_threads import sched_batch_threads

    groups = {"plain": dist.new_group([0, 1])}
    with sched_batch_threads():
        groups["patient"] = dist.new_group([0, 1])
    values, weights = torch.randn(128, 512), torch.randn(512, 512)

    def timed(call: Callable[[], object]) -> float:
        for _ in range(4):
            values @ weights
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def round_trip(group: Any, message: torch.Tensor) -> None:
        for sender in (0, 1):
            if rank == sender:
                dist.send(message, 1 - rank, group=group)
            else:
                dist.recv(message, 1 - rank, group=group)

    rows: list[dict[str, Any]] = []
    for size in SIZES_BYTES:
        buffer = torch.zeros(max(1, size // 4))
        row: dict[str, Any] = {"kind": "all-reduce", "bytes": size, "plain_s": [], "patient_s": []}
        for _ in range(rounds):
            for name, group in groups.items():
                row[f"{name}_s"].append(timed(lambda group=group, buffer=buffer: dist.all_reduce(buffer, group=group)))
        rows.append(row)
    message = torch.zeros(MESSAGE_BYTES // 4)
    row = {"kind": "P2P message", "bytes": MESSAGE_BYTES, "plain_s": [], "patient_s": []}
    for _ in range(rounds):
        for name, group in groups.items():
            row[f"{name}_s"].append(timed(lambda group=group: round_trip(group, message)) / 2)
    rows.append(row)
    return rows


if __name__ == "__main__":
    main()
