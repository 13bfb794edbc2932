"""Plans on shares of one GPU: every strategy on 2, 3 and 4 workers with 1/8 of its SMs each, verified and timed.

    python benchmarks/gpu_shares.py --output FILE                            one GPU with CUDA MPS, about 6 minutes
    python benchmarks/gpu_shares.py --output FILE --training "serial data=2" --inference "" --tensor ""
    python benchmarks/gpu_shares.py --output FILE --tiny                     on CPU cores: tests the script itself

LlamaForCausalLM of 12 layers (width 2048, heads of 64, feed-forward 8192, vocabulary 1024, sequence 1024) in bfloat16,
so that 2, 3 and 4 stages can have equal work. The baseline is one worker with the same share, on the whole batch. The
bound of a pipeline with p stages and m micro-batches is p · m / (m + p − 1), that of other strategies the number of
workers. One share also runs the batch in the pipelines' micro-batches: smaller matrices are less efficient, which is no
cost of the pipeline. Rows are written as they come.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE.parent)]
IS_TINY = bool(os.environ.get("GPU_SHARES_TINY"))
SIZE = os.environ.get("GPU_SHARES_SIZE", "12 2048")
"""Layers and width of the model; workers read it too."""
STARTED = time.perf_counter()


def llama() -> Any:
    """Build the model with an example of one sample."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width = (4, 32) if IS_TINY else map(int, SIZE.split())
    length = 16 if IS_TINY else 1024
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=width // (16 if IS_TINY else 64),
        num_key_value_heads=width // (16 if IS_TINY else 64),
        intermediate_size=4 * width,
        vocab_size=1024,
        max_position_embeddings=length,
        use_cache=False,
    )
    tokens = torch.randint(1024, (1, length), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    with torch.device("cpu" if IS_TINY else "cuda"):  # on the host it would take 9 s
        return LlamaForCausalLM(config).train(), (), {"input_ids": tokens, "labels": tokens}


def compare(strategies: str, share: int, options: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
    """Compare strategies on shares; return the plan that they have in common, and one row for each."""
    import stagewright as sw
    from stagewright.api.progress import Progress

    class Notes(Progress):
        def note(self, text: str) -> None:
            print(f"{time.perf_counter() - STARTED:6.1f} s  {text}", flush=True)

    devices = [f"cpu:{worker % 2}" if IS_TINY else f"cuda:0/{share}" for worker in range(4)]
    chosen = {"hang_s": 60.0, "warmup": 1, "steps": 3, **options}
    begun = time.perf_counter()
    found = sw.compare("gpu_shares:llama", devices=devices, strategies=strategies.split(), progress=Notes(), **chosen)
    taken = time.perf_counter() - begun
    return found.plan, [{**row, "seconds": taken, "options": options} for row in found.to_dict()["rows"]]


def run_microbatches(base: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Run the batch on one share in the pipelines' micro-batches; return its row."""
    from dataclasses import replace

    from stagewright.engine.jobs.compare import run_plan

    plan = replace(base, devices=base.devices[:1], microbatches=options["microbatches"])
    row = run_plan(plan, "runs", hang_s=60.0).to_dict()
    return {**row, "strategy": "serial, micro-batches", "options": options}


def forecast(row: dict[str, Any]) -> None:
    """Add the forecast of a row's plan, or why there is none."""
    import stagewright as sw

    try:
        found = sw.forecast(Path(row["run"]) / "plan.toml")
        row["forecast"] = {"step_s": found.step_s, "peak_memory_bytes": found.peak_memory_bytes}
    except Exception as error:  # the next forecast must run
        row["forecast"] = {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Run the comparisons; one that fails leaves its error."""
    from record import write_record

    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--training", default="serial data=2 data=4 fsdp pipeline=2 pipeline=3 pipeline=4")
    parser.add_argument("--inference", default="serial pipeline=2 pipeline=3 pipeline=4")
    parser.add_argument("--tensor", default="serial tensor=2 tensor=4")
    parser.add_argument("--share", type=int, default=8, help="a worker has 1/SHARE of the SMs")
    parser.add_argument("--size", default=SIZE, help="layers and width")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--precision", choices=("float32", "bf16", "bf16-mixed"), default="bf16")
    parser.add_argument("--compile", choices=("none", "stages", "units"), default="none")
    parser.add_argument("--cuda-graphs", action="store_true")
    parser.add_argument("--forecast", action="store_true", help="forecast each plan too")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny and not IS_TINY:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "GPU_SHARES_TINY": "1"})
    os.environ["GPU_SHARES_SIZE"] = options.size
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    output = options.output.resolve()
    os.chdir(output.parent)
    rows: list[dict[str, Any]] = []
    common: dict[str, Any] = {"batch": options.batch, "microbatches": options.microbatches}
    common |= {"compile": options.compile, "precision": options.precision}
    if options.cuda_graphs:
        common["cuda_graphs"] = True
    for strategies, chosen in (
        (options.training, common),
        (options.inference, {**common, "training": False}),
        (options.tensor, {**common, "batch": 8}),  # verified with attention in plain matrices, which takes more memory
    ):
        if not strategies:
            continue
        try:
            plan, compared = compare(strategies, options.share, chosen)
            rows += compared
            write_record(output, {"share": options.share, "size": options.size, "rows": rows})
            if "pipeline" in strategies:
                rows.append(run_microbatches(plan, chosen))
        except Exception as error:  # the next comparison must run
            rows.append({"options": chosen, "error": f"{type(error).__name__}: {error}"})
        write_record(output, {"share": options.share, "size": options.size, "rows": rows})
    for row in rows if options.forecast else ():
        if row.get("run"):
            forecast(row)
            write_record(output, {"share": options.share, "size": options.size, "rows": rows})
            print(f"{time.perf_counter() - STARTED:6.1f} s  {row['strategy']}: {row['forecast']}", flush=True)
    keys = ("strategy", "workers", "shard", "training", "speedup", "share_of_bound", "samples_per_s", "latency_s")
    keys += ("equal", "peak_memory_bytes", "forecast", "error")
    for row in rows:
        print({key: row.get(key) for key in keys}, flush=True)


if __name__ == "__main__":
    main()
