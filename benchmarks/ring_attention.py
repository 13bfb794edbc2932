"""Ring and all-to-all attention of two workers against attention of one core: time, and memory beside the tensors.

    python benchmarks/ring_attention.py

Causal attention of 8 heads of 64, forward and backward, without dropout. Workers are pinned to a core each. "One core":
both attend to the whole sequence, each for itself, so that all cores are as busy. Memory is the growth of a worker's
resident set.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

from record import write_record
from two_workers import run_two

HEADS, SIZE = 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192], help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each kind; the fastest counts")
    parser.add_argument("--output", default=None, help="JSON file")
    options = parser.parse_args()
    rows = []
    for length in options.lengths:
        row: dict[str, Any] = {"length": length}
        for kind in ("one core", "ring", "all-to-all"):  # in new processes, whose memory starts small
            row[kind] = measure(kind, length, options.rounds)
        rows.append(row)
        alone = row["one core"]
        for kind in ("ring", "all-to-all"):
            found = row[kind]
            faster = alone["seconds"] / found["seconds"]
            print(
                f"{length} tokens, {kind}: {found['seconds'] * 1e3:.0f} ms, {faster:.2f} × one core; "
                f"{found['bytes'] / 2**20:.0f} MiB, one core {alone['bytes'] / 2**20:.0f} MiB"
            )
        if options.output:
            write_record(options.output, {"rows": rows})


def measure(kind: str, length: int, rounds: int) -> dict[str, float]:
    """Run two workers, and return the longer time and the larger memory."""
    found = run_two(work, kind, length, rounds)
    return {name: max(each[name] for each in found) for name in ("seconds", "bytes")}


def work(rank: int, kind: str, length: int, rounds: int) -> dict[str, float]:
    """Run one worker, and return its fastest time and its growth."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    from stagewright.engine.context.axis import ContextAxis
    from stagewright.engine.context.heads import to_heads, to_positions
    from stagewright.engine.context.ring import Attention, ring_attention

    axis = ContextAxis(dist.group.WORLD)
    own = length if kind == "one core" else length // 2
    query, key, value = (torch.randn(1, HEADS, own, SIZE, requires_grad=True) for _ in range(3))
    shape = Attention(
        axis=axis, query_length=length, key_length=length, scale=SIZE**-0.5, is_causal=True, noise=None
    )  # fmt: skip

    def whole() -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    def by_heads() -> torch.Tensor:
        parts = [to_heads(each, axis, length) for each in (query, key, value)]
        return to_positions(functional.scaled_dot_product_attention(*parts, is_causal=True), axis)

    attend: dict[str, Callable[[], torch.Tensor]] = {
        "one core": whole,
        "ring": lambda: ring_attention(query, key, value, None, shape),
        "all-to-all": by_heads,
    }
    before, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        attend[kind]().sum().backward()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": min(seconds), "bytes": (peak - before) * 1024}


if __name__ == "__main__":
    main()
