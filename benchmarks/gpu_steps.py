"""Training steps of plain torch loops on the GPU at hand, to test the analytic forecast against.

    python benchmarks/gpu_steps.py [--output FILE]       one GPU of 80 GiB, 2 minutes

LlamaForCausalLM in bfloat16 with fused AdamW, at several sizes, batches and numbers of micro-batches, without and with
activation checkpointing. Each row states the model's dimensions, the median of ten steps, and peak allocated and
reserved memory. `benchmarks/league.py --steps FILE` compares the rows with the forecast.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

if not torch.cuda.is_available():
    print("skipped: steps are timed on a GPU, and torch finds none here")
    sys.exit(0)

from record import write_record

MODELS = {
    "317M": {
        "layers": 16,
        "width": 1024,
        "heads": 16,
        "kv_heads": 8,
        "feed_forward": 4096,
        "vocabulary": 32000,
        "length": 1024,
    },
    "1.1B": {
        "layers": 16,
        "width": 2048,
        "heads": 32,
        "kv_heads": 8,
        "feed_forward": 8192,
        "vocabulary": 32000,
        "length": 2048,
    },
    "3.1B": {
        "layers": 28,
        "width": 3072,
        "heads": 24,
        "kv_heads": 8,
        "feed_forward": 8192,
        "vocabulary": 32000,
        "length": 4096,
    },
    "600M": {
        "layers": 12,
        "width": 1536,
        "heads": 12,
        "kv_heads": 12,
        "feed_forward": 6144,
        "vocabulary": 50304,
        "length": 2048,
    },
}
# Model, batch, micro-batches, activation checkpointing.
RUNS = (
    ("317M", 16, 1, False),
    ("317M", 16, 8, False),
    ("317M", 16, 2, False),
    ("317M", 32, 1, False),
    ("317M", 32, 1, True),
    ("1.1B", 8, 1, False),
    ("1.1B", 8, 8, False),
    ("1.1B", 8, 2, False),
    ("1.1B", 16, 1, True),
    ("600M", 16, 1, False),
    ("600M", 16, 4, False),
    ("600M", 4, 4, True),
    ("3.1B", 4, 1, False),
    ("3.1B", 8, 8, False),
    ("3.1B", 16, 1, True),
)


def measure(name: str, batch: int, microbatches: int, recompute: bool) -> dict[str, Any]:
    """Return the median time of ten steps and the peak memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = MODELS[name]
    config = LlamaConfig(
        num_hidden_layers=size["layers"],
        hidden_size=size["width"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv_heads"],
        intermediate_size=size["feed_forward"],
        vocab_size=size["vocabulary"],
        max_position_embeddings=size["length"],
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(size["vocabulary"], (batch, size["length"]), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        for part in tokens.chunk(microbatches):
            (model(input_ids=part, labels=part).loss / microbatches).backward()
        optimizer.step()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(11)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    times = [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]
    return {
        "model": name,
        **size,
        "batch": batch,
        "microbatches": microbatches,
        "recompute": recompute,
        "step_s": statistics.median(times),
        "times_s": times,
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("gpu_steps.json"), help="where to write the times")
    options = parser.parse_args()
    record: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "steps": []}
    for run in RUNS:
        try:
            row = measure(*run)
        except torch.cuda.OutOfMemoryError:
            print(f"{run}: out of memory")
            continue
        finally:
            torch.cuda.empty_cache()
        record["steps"].append(row)
        write_record(options.output, record)
        label = f"{run[0]:5} batch {run[1]:3} in {run[2]} {'recompute' if run[3] else '':9}"
        print(f"{label} {row['step_s'] * 1e3:8.1f} ms {row['allocated_bytes'] / 2**30:6.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
