"""What `sw.attach()` costs a training step: blocks of steps with and without it, in turns, in one run.

    python benchmarks/attach_overhead.py [--output FILE]      a step of about 20 ms

Steps are timed in CPU time of this process, all of whose work is in one thread: other programs on the machine count
little. The cost does not depend on the size of the layers, so it is also measured on layers of width 1, where a few
microseconds are seen, and divided by the step. Medians of neighboring blocks are compared; `by_chance` compares blocks
without `attach` in the same way. Profiled steps are counted apart: their start, stop and file are what a profile costs.
The parts of a profiled step, as `explain` prints them, are added up.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stagewright as sw
from record import write_record
from stagewright.attachment.summary import summarize
from stagewright.runs.run_folder import RunFolder
from stagewright.trace.attached import read_attached
from stagewright.trace.waterfall import explain_trace

WARM_STEPS = 5
BATCH = 64


def make_block(width: int, num_steps: int) -> Callable[[], float]:
    """Return a function that trains for some steps and returns the median of their CPU times."""
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())])
    optimizer = torch.optim.AdamW(model.parameters())
    rows = BATCH * (num_steps + WARM_STEPS)
    data = TensorDataset(torch.randn(rows, width), torch.randn(rows, width))

    def block() -> float:
        times = []
        begin_s = time.process_time()
        for x, y in DataLoader(data, batch_size=BATCH):
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            now_s = time.process_time()
            times.append(now_s - begin_s)
            begin_s = now_s
        return statistics.median(times[WARM_STEPS:])

    block()
    return block


def compare(block: Callable[[], float], num_blocks: int, scratch: str) -> tuple[list[float], list[float]]:
    """Return the median steps of blocks without and with `attach`, in turns."""
    plain, attached = [], []
    for _ in range(num_blocks):
        plain.append(block())
        run = sw.attach(scratch, profile_steps=[10**9])
        attached.append(block())
        run.stop()
    return plain, attached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10, help="blocks of steps with `attach`, and as many without")
    parser.add_argument("--steps", type=int, default=40, help="steps of a block")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--output", type=Path, help="where to write the record")
    options = parser.parse_args()
    torch.set_num_threads(1)
    block = make_block(options.width, options.steps)
    with tempfile.TemporaryDirectory() as scratch:
        small_plain, small_attached = compare(make_block(1, options.steps), 4 * options.blocks, scratch)
        plain, attached = compare(block, options.blocks, scratch)
        run = sw.attach(scratch, profile_steps=[5])
        block()
        run.stop()
        assert run.path is not None
        folder = RunFolder.open(run.path)
        summary, explanation = summarize(folder), explain_trace(read_attached(folder))
    cost_s = statistics.median(second - first for first, second in zip(small_plain, small_attached, strict=True))
    step_s = statistics.median(plain)
    content = {
        "step_s": step_s,
        "cost_s": cost_s,
        "share": cost_s / step_s,
        "difference": statistics.median(second / first for first, second in zip(plain, attached, strict=True)) - 1,
        "by_chance": statistics.median(second / first for first, second in itertools.pairwise(plain)) - 1,
        "small_step_s": statistics.median(small_plain),
        "profiling_s": summary.profiling_s,
        "blocks": options.blocks,
        "steps": options.steps,
        "parts": {row.name: row.share for row in explanation.rows},
        "sum_of_parts": sum(row.share for row in explanation.rows),
    }
    print(
        f"attach costs {1e6 * cost_s:.1f} µs per step: {content['share']:.2%} of a step of {1e3 * step_s:.1f} ms (of "
        f"which whole steps differ by {content['difference']:+.2%}, by chance by {content['by_chance']:+.2%}); a "
        f"profile of three steps costs {1e3 * summary.profiling_s:.0f} ms; the parts of a step add up to "
        f"{content['sum_of_parts']:.2%}"
    )
    if options.output is not None:
        write_record(options.output, content)


if __name__ == "__main__":
    main()
