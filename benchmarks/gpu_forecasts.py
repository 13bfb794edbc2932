"""Forecasts of plans for one GPU beside their steps: time and peak memory.

    python benchmarks/gpu_forecasts.py --output FILE               one GPU of 80 GiB, about 6 minutes
    python benchmarks/gpu_forecasts.py --output FILE --only 0-3    some of the plans
    python benchmarks/gpu_forecasts.py --output FILE --tiny        small models on a CPU core: tests the script itself

Each plan has a process of its own, in which it is run through `sw.parallelize` and forecast from measured units
(`sw.forecast`, with a fresh cache). A step is the median of eight; memory is the allocator's peak during them. Compiled
plans are run once before, several at a time, so that the compiler's cache has their kernels. Rows are written as they
come; a plan that fails leaves its error.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE.parent)]
IS_TINY = bool(os.environ.get("GPU_FORECASTS_TINY"))
DEVICE = "cpu:0" if IS_TINY else "cuda:0"
SIZES = {
    "317M": {"num_hidden_layers": 16, "hidden_size": 1024, "num_attention_heads": 16, "length": 1024},
    "1.1B": {"num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "length": 2048},
    "tiny": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "length": 16},
}
LLAMA, LARGE = "gpu_forecasts:llama_317m", "gpu_forecasts:llama_1b"
SMALL = {"model": LLAMA, "batch": 16, "precision": "bf16", "microbatches": 8}
TWO_STAGES = {"cuts": ("model.layers.7",), "schedule": "interleaved"}
PLANS: list[dict[str, Any]] = [
    {"model": LLAMA, "batch": 16, "precision": "bf16"},
    {"model": LLAMA, "batch": 16, "precision": "bf16", "compile": "stages"},
    SMALL,
    {**SMALL, "compile": "stages"},
    {**SMALL, "cuda_graphs": True},
    {**SMALL, "compile": "stages", "cuda_graphs": True},
    {**SMALL, "compile": "stages", **TWO_STAGES},
    {**SMALL, "compile": "stages", "cuda_graphs": True, **TWO_STAGES},
    {"model": LLAMA, "batch": 16, "precision": "bf16", "recompute": "always"},
    {"model": LLAMA, "batch": 16, "precision": "bf16-mixed"},
    {"model": LLAMA, "batch": 8, "precision": "float32"},
    {"model": LARGE, "batch": 8, "precision": "bf16"},
    {"model": LARGE, "batch": 8, "precision": "bf16", "compile": "stages"},
    {"model": LARGE, "batch": 8, "precision": "bf16", "microbatches": 2, "recompute": "always"},
    {"model": "gpt2", "batch": 64, "precision": "bf16"},
    {"model": "gpt2", "batch": 64, "precision": "bf16-mixed"},
    {"model": "gpt2", "batch": 32, "precision": "float32", "microbatches": 2},
    {"model": "resnet-50", "batch": 128, "precision": "float32"},
    {"model": "resnet-50", "batch": 256, "precision": "bf16-mixed"},
    {"model": "deit-base", "batch": 128, "precision": "bf16"},
    {"model": "deit-base", "batch": 128, "precision": "bf16", "compile": "stages"},
    {"model": "deit-base", "batch": 512, "precision": "bf16-mixed", "microbatches": 4},
    {"model": "deit-base", "batch": 128, "precision": "float32"},
]
if IS_TINY:
    PLANS = [
        {"model": "gpu_forecasts:llama_tiny", "batch": 4, "precision": "float32"},
        {"model": "gpu_forecasts:llama_tiny", "batch": 4, "precision": "bf16-mixed", "microbatches": 2},
        {"model": "gpu_forecasts:llama_tiny", "batch": 4, "recompute": "always"},
        {"model": "digits-vit", "batch": 8, "compile": "stages"},
    ]


def llama(size: str) -> Any:
    """Build a Llama with an example of one sample."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    options: dict[str, Any] = dict(SIZES[size])
    length, width = options.pop("length"), options["hidden_size"]
    vocabulary = 100 if size == "tiny" else 32000
    config = LlamaConfig(
        **options,
        num_key_value_heads=2 if size == "tiny" else 8,
        intermediate_size=4 * width,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        use_cache=False,
    )
    tokens = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    with torch.device(DEVICE.split(":")[0]):
        return LlamaForCausalLM(config).train(), (), {"input_ids": tokens, "labels": tokens}


def llama_317m() -> Any:
    """Build the smaller Llama."""
    return llama("317M")


def llama_1b() -> Any:
    """Build the larger Llama."""
    return llama("1.1B")


def llama_tiny() -> Any:
    """Build one for tests."""
    return llama("tiny")


def run(plan: Any) -> dict[str, Any]:
    """Run training steps of a plan; return the median step and the allocator's peak."""
    import torch

    import stagewright as sw

    device = torch.device("cpu" if IS_TINY else "cuda")
    model = plan.model.load(batch=plan.batch, dtype=plan.dtype).to(device)
    example = sw.Batch(args=model.args, kwargs=model.kwargs, target=model.target)
    trainer = sw.parallelize(model.module, example, plan=plan, loss=model.loss)
    on_gpu = not IS_TINY
    for _ in range(3):
        loss = trainer.step(example).loss
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(2 if IS_TINY else 8):
        start = time.perf_counter()
        trainer.step(example)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    return {"step_s": statistics.median(seconds), "peak_memory_bytes": peak, "loss": loss}


def check(about: dict[str, Any], cache: str) -> dict[str, Any]:
    """Run and forecast one plan."""
    import stagewright as sw
    from stagewright.planner.costs.measure import measure_model

    options = dict(about)
    plan = sw.Plan.of(options.pop("model"), options.pop("batch"), devices=(DEVICE,), **options)
    begun = time.perf_counter()
    measured = run(plan)
    free_memory()
    ran_s = time.perf_counter() - begun
    forecast = sw.forecast(plan, cache=cache)
    forecast_s = time.perf_counter() - begun - ran_s
    free_memory()
    row = {
        "measured": measured,
        "forecast": {"step_s": forecast.step_s, "peak_memory_bytes": forecast.peak_memory_bytes},
    }
    row |= {"run_s": ran_s, "forecast_s": forecast_s, "parts_s": parts(measure_model(plan, cache=cache))}
    row["time_error"] = forecast.step_s / measured["step_s"] - 1
    if measured["peak_memory_bytes"]:
        row["memory_error"] = _peak(forecast.peak_memory_bytes) / measured["peak_memory_bytes"] - 1
    skipped = {"times_s", "held_bytes"}
    row["memory"] = [
        {key: value for key, value in worker.to_dict().items() if key not in skipped}
        for worker in (worker.memory for worker in forecast.workers)
    ]
    return row


def parts(costs: Any) -> dict[str, float]:
    """Return what the forecast is made of."""
    profile, overheads = costs.profile, costs.overheads
    num_bytes = sum(unit.parameter_bytes.total for unit in profile.units)
    return {
        "forward": profile.whole_forward.median_s,
        "backward": profile.whole_backward.median_s,
        "first pass": profile.first_pass_s,
        "following pass": profile.following_pass_s,
        "units": sum(unit.total_s for unit in profile.units),
        "loss": overheads.loss_forward_s + overheads.loss_backward_s,
        "optimizer": overheads.optimizer_s_per_byte * num_bytes,
        "accumulation": overheads.accumulate_s_per_byte * num_bytes,
    }


def start_check(about: dict[str, Any], cache: str) -> Any:
    """Check one plan in a process of its own, which has imported the libraries already; return where its row comes."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    multiprocessing.get_context("fork").Process(target=_send_row, args=(theirs, about, cache)).start()
    theirs.close()
    return ours


def receive_row(connection: Any) -> dict[str, Any]:
    """Wait for the row of a check."""
    try:
        row: dict[str, Any] = connection.recv()
    except EOFError:
        row = {"error": "the process died"}
    return row


def _send_row(connection: Any, about: dict[str, Any], cache: str) -> None:
    try:
        row = check(about, cache)
    except Exception as error:  # the next plan must run
        where = "".join(traceback.format_tb(error.__traceback__)[-2:])
        row = {"error": f"{type(error).__name__}: {str(error)[:1500]}\n{where}"}
    connection.send(row)
    connection.close()


def _peak(peaks: Any) -> int:
    return int(max(peaks)) if isinstance(peaks, list | tuple) else int(peaks)


def free_memory() -> None:
    """Free what the last model held."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def import_libraries() -> None:
    """Import what all plans need, without touching the GPU, which a forked process could not use then."""
    import transformers

    import stagewright.api.forecast
    import stagewright.planner.calibration.calibrate

    modules = transformers.LlamaForCausalLM, stagewright.api.forecast, stagewright.planner.calibration.calibrate
    assert all(modules)


def chosen(text: str | None) -> list[int]:
    """Return the numbers of the plans to run, from ``0-3,7``."""
    if text is None:
        return list(range(len(PLANS)))
    numbers = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += list(range(int(first), int(last or first) + 1))
    return numbers


def main() -> None:
    """Run all plans and print the table."""
    from record import write_record

    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", help="plans by number: 0-3,7")
    parser.add_argument("--limit-s", type=float, default=570, help="start no plan after this time")
    parser.add_argument("--at-once", type=int, default=4, help="compiled plans run at a time beforehand")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny and not IS_TINY:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "GPU_FORECASTS_TINY": "1"})
    import_libraries()
    rows: list[dict[str, Any]] = []
    begun = time.perf_counter()
    numbers = chosen(options.only)
    with tempfile.TemporaryDirectory() as cache:
        compiled = [PLANS[number] for number in numbers if PLANS[number].get("compile", "none") != "none"]
        for first in range(0, len(compiled), options.at_once):
            group = enumerate(compiled[first : first + options.at_once], first)
            for connection in [start_check(plan, f"{cache}/{number}") for number, plan in group]:
                receive_row(connection)
        print(f"compiled after {time.perf_counter() - begun:.0f} s", flush=True)
        for number in numbers:
            if time.perf_counter() - begun > options.limit_s:
                break
            row = {"plan": PLANS[number], **receive_row(start_check(PLANS[number], cache))}
            rows.append(row)
            print(line(number, row), flush=True)
            # In a process of its own: it asks for the GPU's name, after which no plan could be forked.
            multiprocessing.get_context("fork").Process(
                target=write_record, args=(options.output, {"rows": rows})
            ).start()
    for key in ("time_error", "memory_error"):
        errors = [abs(row[key]) for row in rows if key in row]
        if errors:
            print(f"{key}: mean {statistics.mean(errors):.1%}, worst {max(errors):.1%} of {len(errors)}")


def line(number: int, row: dict[str, Any]) -> str:
    """Return one row as text."""
    name = ", ".join(str(value) for value in row["plan"].values())
    if "error" in row:
        return f"{number:2} {name}: {row['error'][:600]}"
    times = [1e3 * row[part]["step_s"] for part in ("forecast", "measured")]
    peaks = [_peak(row[part]["peak_memory_bytes"]) / 2**30 for part in ("forecast", "measured")]
    return (
        f"{number:2} {name}: {times[0]:.1f} / {times[1]:.1f} ms ({row['time_error']:+.1%}), "
        f"{peaks[0]:.2f} / {peaks[1]:.2f} GiB ({row.get('memory_error', 0):+.1%}), "
        f"ran {row['run_s']:.0f} s, forecast {row['forecast_s']:.0f} s"
    )


if __name__ == "__main__":
    main()
