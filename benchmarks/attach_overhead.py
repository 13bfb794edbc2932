"""What `sw.attach()` costs a training step: blocks of steps with and without it, in turns, in one run.

    python benchmarks/attach_overhead.py [--output FILE]      a step of about 20 ms; prints the ratio of the medians

Blocks of steps with and without it alternate, and medians of neighboring blocks are compared; `by_chance` compares
blocks without it in the same way. Profiled steps are counted apart: their start, stop and file are what a profile
costs. The parts of a profiled step, as `explain` prints them, are added up.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20, help="blocks of steps, half of them attached")
    parser.add_argument("--steps", type=int, default=40, help="steps of a block")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--output", type=Path, help="where to write the record")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(options.width, options.width), nn.ReLU())])
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(64 * options.steps, options.width), torch.randn(64 * options.steps, options.width))

    def block() -> list[float]:
        times = []
        begin_s = time.perf_counter()
        for x, y in DataLoader(data, batch_size=64):
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            now_s = time.perf_counter()
            times.append(now_s - begin_s)
            begin_s = now_s
        return times[5:]

    block()
    plain: list[list[float]] = []
    attached: list[list[float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for index in range(options.blocks):
            if index % 2:
                run = sw.attach(scratch, profile_steps=[10**9])
                attached.append(block())
                run.stop()
            else:
                plain.append(block())
        run = sw.attach(scratch, profile_steps=[5])
        block()
        run.stop()
        assert run.path is not None
        folder = RunFolder.open(run.path)
        summary, explanation = summarize(folder), explain_trace(read_attached(folder))
    ratio = statistics.median(
        statistics.median(w) / statistics.median(o) for o, w in zip(plain, attached, strict=False)
    )
    by_chance = statistics.median(
        statistics.median(second) / statistics.median(first) for first, second in itertools.pairwise(plain)
    )
    content = {
        "plain_s": statistics.median(time_s for times in plain for time_s in times),
        "attached_s": statistics.median(time_s for times in attached for time_s in times),
        "overhead": ratio - 1,
        "by_chance": by_chance - 1,
        "recording": summary.recording,
        "profiling_s": summary.profiling_s,
        "steps": sum(map(len, plain)),
        "parts": {row.name: row.share for row in explanation.rows},
        "sum_of_parts": sum(row.share for row in explanation.rows),
    }
    print(
        f"step {1e3 * content['plain_s']:.2f} ms, attached {1e3 * content['attached_s']:.2f} ms: {ratio - 1:+.2%} (by "
        f"chance {by_chance - 1:+.2%}); recording measures itself as {summary.recording:.2%} of a step; a profile of "
        f"three steps costs {1e3 * summary.profiling_s:.0f} ms; the parts of a step add up to "
        f"{content['sum_of_parts']:.2%}"
    )
    if options.output is not None:
        write_record(options.output, content)


if __name__ == "__main__":
    main()
