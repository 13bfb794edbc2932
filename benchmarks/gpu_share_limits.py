"""How fast plans on shares of one GPU could be: plain torch loops on as many shares at once, without communication.

    python benchmarks/gpu_share_limits.py --output FILE            one GPU with CUDA MPS, about 4 minutes

The model and batch of `gpu_shares.py`. A worker of `data=n` runs 1/n of the batch; one of `pipeline=p` runs 1/p of the
layers on the whole batch, in micro-batches, with an embedding and a head of its own. Each has 1/8 of the SMs, and all
run at the same time, so what they lose to smaller matrices and to the shared caches and memory bandwidth is measured,
but no message, no bubble and no wait. The limit of a plan is the whole model's step on one share over theirs, as a
share of the plan's bound.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE.parent)]
PLANS = [("data", 2), ("data", 4), ("pipeline", 2), ("pipeline", 3), ("pipeline", 4)]
SIZES = {"gpu": (12, 2048, 1024), "tiny": (4, 32, 16)}
"""Layers, width and sequence length."""


def loop(size: str, layers: int, batch: int, microbatches: int, steps: int, *, training: bool) -> None:
    """Time steps of a plain loop; print that it is ready, wait for a line, then print the seconds."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    _, width, length = SIZES[size]
    device = "cuda" if size == "gpu" else "cpu"
    heads = width // (64 if size == "gpu" else 16)
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=4 * width,
        vocab_size=1024,
        max_position_embeddings=length,
        use_cache=False,
    )
    with torch.device(device):
        model: Any = LlamaForCausalLM(config).to(torch.bfloat16).train(training)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device == "cuda")
    parts = torch.randint(1024, (batch, length), device=device).split(batch // microbatches)

    def step() -> None:
        with torch.set_grad_enabled(training):
            for part in parts:
                loss = model(input_ids=part, labels=part).loss / len(parts)
                if training:
                    loss.backward()
        if training:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()

    step()
    print("ready", flush=True)
    sys.stdin.readline()
    seconds = []
    for _ in range(steps):
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    print(json.dumps(seconds), flush=True)


def at_once(count: int, words: list[str]) -> list[float]:
    """Run loops at the same time; return the median step of each."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE), "--loop", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(count)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"a loop of {words} failed")
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return [statistics.median(json.loads(process.communicate()[0])) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Measure the whole model on one share, then the parts of each plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--share", type=int, default=8, help="a worker has 1/SHARE of the SMs")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--modes", default="training,inference")
    parser.add_argument("--tiny", action="store_true", help="small models on CPU cores: tests the script itself")
    parser.add_argument("--loop", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop:
        size, mode, *numbers = options.loop
        loop(size, *map(int, numbers), training=mode == "training")
        return
    if options.output is None:
        parser.error("--output is missing")
    from record import machine_text, write_record

    if not options.tiny:
        from stagewright.gpu_sharing.mps import use_share

        use_share(0, options.share)
    machine = (
        subprocess.run(
            [sys.executable, "-c", "from record import machine_text; print(machine_text())"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[:2])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        if not options.tiny
        else machine_text()
    )
    size = "tiny" if options.tiny else "gpu"
    layers = SIZES[size][0]
    rows: list[dict[str, Any]] = []
    for mode in options.modes.split(","):
        (whole_s,) = at_once(1, [size, mode, *map(str, (layers, options.batch, 1, options.steps))])
        for strategy, count in PLANS:
            if strategy == "data" and mode == "inference":
                continue
            shape = (
                (layers, options.batch // count, 1)
                if strategy == "data"
                else (layers // count, options.batch, options.microbatches)
            )
            seconds = at_once(count, [size, mode, *map(str, (*shape, options.steps))])
            share = whole_s / (count * max(seconds))
            row = {"strategy": strategy, "workers": count, "training": mode == "training", "whole_s": whole_s}
            rows.append({**row, "at_once_s": seconds, "share_of_bound": share})
            print(f"{mode}, {strategy}={count}: {share:.1%} of the bound", flush=True)
            about = {"share": options.share, "batch": options.batch, "microbatches": options.microbatches}
            write_record(options.output, {**about, "rows": rows}, machine)


if __name__ == "__main__":
    main()
