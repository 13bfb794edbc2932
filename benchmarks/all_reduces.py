"""All-reduces between CPU workers of one machine: through Gloo's sockets and through shared memory.

    python benchmarks/all_reduces.py

Two workers, one core each, compute for a moment before every all-reduce, as layers do. The same processes alternate
between the two groups; sums must be equal to the last bit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from record import write_record
from two_workers import run_two

SIZES_BYTES = (64 << 10, 768 << 10, 3 << 20, 12 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="rounds of each size")
    parser.add_argument("--output", default=None, help="JSON file")
    options = parser.parse_args()
    rows, _ = run_two(work, options.rounds)
    for row in rows:
        gloo, memory = (statistics.median(row[name]) for name in ("gloo_s", "memory_s"))
        cpu = statistics.fmean(row["gloo_cpu_s"]) / statistics.fmean(row["memory_cpu_s"])
        print(
            f"{row['bytes'] >> 10} KiB: Gloo {gloo * 1e3:.2f} ms, shared memory {memory * 1e3:.2f} ms, "
            f"{gloo / memory:.1f} × faster with 1/{cpu:.1f} of the processor time"
        )
    if options.output:
        write_record(options.output, {"rows": rows})


def work(rank: int, rounds: int) -> list[dict[str, Any]]:
    """Run one worker, and return its times."""
    import torch
    import torch.distributed as dist

    from stagewright.machine.gloo_threads import sched_batch_threads
    from stagewright.shared_memory.process_group import HOST_BACKEND, register

    with sched_batch_threads():  # as the engine creates it
        groups = {"gloo": dist.new_group([0, 1])}
    groups["memory"] = dist.new_group([0, 1], backend=register(HOST_BACKEND))
    values, weights = torch.randn(128, 512), torch.randn(512, 512)
    rows: list[dict[str, Any]] = []
    for size in SIZES_BYTES:
        sent = torch.randn(size // 4, generator=torch.Generator().manual_seed(rank))
        row: dict[str, Any] = {"bytes": size, **{f"{name}{part}_s": [] for name in groups for part in ("", "_cpu")}}
        sums: dict[str, torch.Tensor] = {}
        for _ in range(rounds):
            for name, group in groups.items():
                sums[name] = sent.clone()
                for _ in range(4):
                    values @ weights
                cpu, start = time.process_time(), time.perf_counter()
                dist.all_reduce(sums[name], group=group)
                row[f"{name}_s"].append(time.perf_counter() - start)
                row[f"{name}_cpu_s"].append(time.process_time() - cpu)
            assert torch.equal(sums["gloo"], sums["memory"])
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
