"""What `sw.attach()` costs a training step: blocks of steps with and without it, in turns, in one run.

    python benchmarks/attach_overhead.py               a step of about 20 ms; prints the ratio of the medians

Profiled steps are counted apart: their start, stop and file are what a profile costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stagewright as sw
from stagewright.attachment.summary import summarize
from stagewright.runs.run_folder import RunFolder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20, help="blocks of steps, half of them attached")
    parser.add_argument("--steps", type=int, default=40, help="steps of a block")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--json", type=Path)
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
    plain: list[float] = []
    attached: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        for index in range(options.blocks):
            if index % 2:
                run = sw.attach(scratch, profile_steps=[10**9])
                attached += block()
                run.stop()
            else:
                plain += block()
        run = sw.attach(scratch, profile_steps=[5])
        block()
        run.stop()
        assert run.path is not None
        summary = summarize(RunFolder.open(run.path))
    ratio = statistics.median(attached) / statistics.median(plain)
    content = {
        "plain_s": statistics.median(plain),
        "attached_s": statistics.median(attached),
        "ratio": ratio,
        "recording": summary.recording,
        "profiling_s": summary.profiling_s,
        "steps": len(plain),
    }
    print(
        f"step {1e3 * content['plain_s']:.2f} ms, attached {1e3 * content['attached_s']:.2f} ms: ratio {ratio:.4f}; "
        f"recording measures itself as {summary.recording:.2%} of a step; a profile of three steps costs "
        f"{1e3 * summary.profiling_s:.0f} ms"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
