"""The GPU table: plain torch loops beside Stagewright, eager and compiled, on the one GPU at hand.

    python benchmarks/gpu_table.py --output FOLDER             one GPU of 80 GiB, 4 minutes
    python benchmarks/gpu_table.py --output FOLDER --tiny      a small model on a CPU core: tests the script itself

LlamaForCausalLM of 317 M parameters (16 layers, width 1024, 16 heads, 8 key/value heads, feed-forward 4096, vocabulary
32000, sequence 1024) in bfloat16, batch 16. Every step has a time limit; one that fails or runs out of time leaves its
error in the table and the next one runs. Results go to FOLDER/gpu_table.json and FOLDER/gpu_table.txt as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE.parent)]

FULL = {"layers": 16, "width": 1024, "heads": 16, "kv_heads": 8, "mlp": 4096, "vocabulary": 32000, "length": 1024}
TINY = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "mlp": 64, "vocabulary": 100, "length": 16}
IS_TINY = bool(os.environ.get("GPU_TABLE_TINY"))
PATIENCE = 10 if IS_TINY else 1
LIMIT_S = 235.0 * PATIENCE
SIZE = TINY if IS_TINY else FULL
DEVICE = "cpu" if IS_TINY else "cuda"
BATCH, MICROBATCHES = 16, 8


def llama() -> Any:
    """Build the model with an example of one sample: the factory of `stagewright compare gpu_table:llama`."""
    import torch

    tokens = torch.randint(SIZE["vocabulary"], (1, SIZE["length"]), generator=torch.Generator().manual_seed(0))
    return make_llama("cpu"), (), {"input_ids": tokens, "labels": tokens}


def make_llama(device: str, dtype: Any = None) -> Any:
    """Build the model on a device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=SIZE["layers"],
        hidden_size=SIZE["width"],
        num_attention_heads=SIZE["heads"],
        num_key_value_heads=SIZE["kv_heads"],
        intermediate_size=SIZE["mlp"],
        vocab_size=SIZE["vocabulary"],
        max_position_embeddings=SIZE["length"],
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype or torch.float32).train()


class Steps:
    """The measurements that run in one process, each under its time limit."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.rows: dict[str, Any] = {}
        self.graph: Any = None

    def run(self, name: str, limit_s: float, measure: Callable[[], Any]) -> None:
        """Run one measurement and write its result, or its error."""
        left_s = LIMIT_S * 0.62 - (time.perf_counter() - STARTED)
        start = time.perf_counter()
        if left_s < 5:
            self.rows[name] = {"error": "not run: no time left"}
        else:
            signal.signal(signal.SIGALRM, _out_of_time)
            signal.setitimer(signal.ITIMER_REAL, min(limit_s * PATIENCE, left_s))
            try:
                self.rows[name] = measure()
            except BaseException as error:  # the next measurement must run
                self.rows[name] = {"error": f"{type(error).__name__}: {str(error)[:1500]}"}
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        self.rows[name]["took_s"] = time.perf_counter() - start
        (self.output / "in_process.json").write_text(json.dumps(self.rows, indent=1))
        _free()

    def all(self) -> None:
        """Run all measurements."""
        self.run("imports", 60, self.imports)
        self.run("plain eager", 30, lambda: self.plain(1))
        self.run("plain eager, 8 micro-batches", 30, lambda: self.plain(MICROBATCHES))
        self.run("capture in bf16", 30, self.capture)
        self.run("two stages, eager", 30, lambda: self.two_stages("none"))
        self.run("two stages, units compiled", 45, lambda: self.two_stages("units"))
        self.run("two stages, stages compiled", 70, lambda: self.two_stages("stages"))
        self.graph = None
        self.run("serial, eager", 30, lambda: self.serial("none"))
        self.run("serial, compiled", 60, lambda: self.serial("stages"))
        self.run("plain compiled", 60, lambda: self.plain(1, compiled=True))

    def imports(self) -> dict[str, Any]:
        """Import everything once."""
        import torch
        import transformers
        from transformers import LlamaForCausalLM

        import stagewright

        gpu = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
        versions = {module.__name__: module.__version__ for module in (torch, transformers, stagewright)}
        return {"gpu": gpu, "class": LlamaForCausalLM.__name__, **versions}

    def plain(self, microbatches: int, *, compiled: bool = False) -> dict[str, Any]:
        """Time a plain torch loop."""
        import torch

        model = make_llama(DEVICE, torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        tokens = _tokens()
        run = torch.compile(model, dynamic=False) if compiled else model

        def step() -> Any:
            optimizer.zero_grad()
            for part in tokens.chunk(microbatches):
                loss = run(input_ids=part, labels=part).loss / microbatches
                loss.backward()
            optimizer.step()
            return loss

        start = time.perf_counter()
        step()
        _wait()
        first = {"first_step_s": time.perf_counter() - start, "since_start_s": time.perf_counter() - STARTED}
        return {**first, **_time(step)}

    def capture(self) -> dict[str, Any]:
        """Capture the model in bf16 on the device, in training mode."""
        import torch

        import stagewright as sw

        tokens = _tokens()[:2]
        start = time.perf_counter()
        self.graph = sw.capture(make_llama(DEVICE, torch.bfloat16), (), {"input_ids": tokens, "labels": tokens})
        return {"seconds": time.perf_counter() - start, "units": len(self.graph.calls)}

    def two_stages(self, mode: str) -> dict[str, Any]:
        """Time forward and backward of two captured stages in one process, 8 micro-batches of 2, as GPipe."""
        import torch

        from stagewright.graph.compilation import compile_counts, compile_stage, compiled_units

        graph, tokens = self.graph, _tokens()
        stages = graph.stages([len(graph.calls) // 2 - 1])
        before = compile_counts()
        if mode == "stages":
            for stage in stages:
                compile_stage(stage)
        losses: list[Any] = []

        def step() -> None:
            losses.clear()
            waiting = []
            for part in tokens.chunk(MICROBATCHES):
                middle = stages[0](*graph.flatten((), {"input_ids": part, "labels": part}))
                received = [v.detach().requires_grad_(v.requires_grad) for v in middle]
                loss = graph.unflatten(stages[1](*received)).loss / MICROBATCHES
                losses.append(loss)
                waiting.append((middle, received, loss))
            for middle, received, loss in waiting:
                loss.backward()
                pairs = [(m, r.grad) for m, r in zip(middle, received, strict=True) if r.grad is not None]
                torch.autograd.backward([m for m, _ in pairs], [g for _, g in pairs])
            for parameter in graph.model.parameters():
                parameter.grad = None

        start = time.perf_counter()
        modules = [graph.module(call) for call in graph.calls]
        if mode == "units":
            with compiled_units(modules):
                step()
                _wait()
                first_s = time.perf_counter() - start
                timed = _time(step)
        else:
            step()
            _wait()
            first_s = time.perf_counter() - start
            timed = _time(step)
        after = compile_counts()
        counts = {
            "graphs": after.graphs - before.graphs,
            "graph_breaks": after.graph_breaks - before.graph_breaks,
            "reasons": list(after.reasons),
        }
        return {**timed, "first_step_s": first_s, "loss": float(sum(losses).detach()), **counts}

    def serial(self, mode: str) -> dict[str, Any]:
        """Time training steps through `sw.parallelize` on one device."""
        import torch

        import stagewright as sw

        model, tokens = make_llama(DEVICE, torch.bfloat16), _tokens()
        example = sw.Batch(args=(), kwargs={"input_ids": tokens, "labels": tokens})
        device = "cpu:0" if IS_TINY else "cuda:0"
        plan = sw.Plan.of("llama", batch=BATCH, devices=(device,), precision="bf16", compile=mode)
        start = time.perf_counter()
        trainer = sw.parallelize(
            model, example, plan=plan, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        )
        built_s = time.perf_counter() - start
        start = time.perf_counter()
        loss = trainer.step(example).loss
        first = {"build_s": built_s, "first_step_s": time.perf_counter() - start, "first_loss": loss}
        return {**first, **_time(lambda: trainer.step(example))}


def _tokens() -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(SIZE["vocabulary"], (BATCH, SIZE["length"]), generator=generator).to(DEVICE)


def _wait() -> None:
    import torch

    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _time(step: Callable[[], Any], repeats: int = 8) -> dict[str, Any]:
    """Return the median of several steps, throughput and peak memory."""
    import torch

    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step()
    seconds = []
    for _ in range(2 if IS_TINY else repeats):
        _wait()
        start = time.perf_counter()
        step()
        _wait()
        seconds.append(time.perf_counter() - start)
    step_s = statistics.median(seconds)
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    return {"step_ms": 1e3 * step_s, "samples_per_s": BATCH / step_s, "peak_gib": peak / 2**30, "steps": len(seconds)}


def _free() -> None:
    import gc

    gc.collect()
    if DEVICE == "cuda":
        import torch

        torch.cuda.empty_cache()


def _out_of_time(*_: Any) -> None:
    raise TimeoutError("the time limit of this measurement was reached")


def run_commands(output: Path, rows: dict[str, Any]) -> None:
    """Run `compare` and `forecast` as a user does, and compare the forecast with the measured step."""
    device = "cpu:0" if IS_TINY else "cuda:0"
    stagewright = [sys.executable, "-m", "stagewright"]
    model = ["gpu_table:llama", "--devices", device, "--batch", str(BATCH), "--precision", "bf16"]
    runs = output / "runs"
    words = ["compare", *model, "--strategies", "serial", "--steps", "5", "--root", str(runs), "--json"]
    row = rows["compare serial"] = _command([*stagewright, *words], 75, watch=runs)
    if "answer" in row:
        (first,) = row.pop("answer")["rows"] if isinstance(row["answer"], dict) else row.pop("answer")
        if "error" in first:
            row["error"] = first["error"][-2500:]
            return
        row |= {"samples_per_s": first["samples_per_s"], "step_ms": 1e3 * first["latency_s"], "equal": first["equal"]}
        row |= {"equality": first["equality"], "peak_gib": max(first["peak_memory_bytes"]) / 2**30}
        plan = Path(first["run"]) / "plan.toml"
        cache = output / "cache"
        row = rows["forecast of the same plan"] = _command(
            [*stagewright, "forecast", str(plan), "--json", "--cache-dir", str(cache)], 75
        )
        if "answer" in row:
            answer = row.pop("answer")
            row |= {"step_ms": 1e3 * answer["step_s"], "error": None}
            row["forecast_error"] = answer["step_s"] / first["latency_s"] - 1
            peak = answer["peak_memory_bytes"]
            peak = max(peak) if isinstance(peak, list) else peak
            row["memory_error"] = peak / max(first["peak_memory_bytes"]) - 1
            for path in cache.glob("calibration*.json"):
                row["overhead_per_action_us"] = 1e6 * json.loads(path.read_text())["terms"]["action_s"]


def _command(words: list[str], limit_s: float, watch: Path | None = None) -> dict[str, Any]:
    """Run a command that prints JSON; report when the first step of a run was measured."""
    left_s = LIMIT_S - (time.perf_counter() - STARTED)
    row: dict[str, Any] = {"command": " ".join(words[1:])}
    if left_s < 15:
        return {**row, "error": "not run: no time left"}
    path = os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE.parent)])
    start = time.perf_counter()
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    deadline = start + min(limit_s * PATIENCE, left_s)
    while watch is not None and process.poll() is None and time.perf_counter() < deadline:
        if any(watch.glob("*/workers/0/metrics.jsonl")):
            row["first_measured_step_s"] = time.perf_counter() - start
            break
        time.sleep(0.1)
    try:
        out, err = process.communicate(timeout=max(1.0, deadline - time.perf_counter()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {**row, "error": f"ended after {time.perf_counter() - start:.0f} s"}
    row["seconds"] = time.perf_counter() - start
    if process.returncode not in (0, 3):
        return {**row, "error": (err or out)[-2500:]}
    try:
        return {**row, "answer": json.loads(out)}
    except ValueError:
        return {**row, "error": f"no JSON: {out[-500:]} {err[-1000:]}"}


def table(rows: dict[str, Any]) -> str:
    """Return the results as text."""
    lines = []
    for name, row in rows.items():
        values = ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in row.items()
            if key not in ("command",) and value is not None
        )
        lines.append(f"{name}: {values}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the in-process measurements in a child process, then the commands; write results after each."""
    from record import write_record

    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.steps:
        Steps(options.output).all()
        return
    environment = {**os.environ, **({"GPU_TABLE_TINY": "1"} if options.tiny else {})}
    if options.tiny and not IS_TINY:
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    rows: dict[str, Any] = {}
    words = [sys.executable, str(HERE), "--output", str(options.output), "--steps"]
    child = subprocess.Popen(words, env=environment, start_new_session=True)
    try:
        child.wait(LIMIT_S * 0.65)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    written = options.output / "in_process.json"
    if written.is_file():
        rows |= json.loads(written.read_text())
    for finish in (lambda: None, lambda: run_commands(options.output, rows)):
        try:
            finish()
        except Exception as error:
            rows["commands"] = {"error": f"{type(error).__name__}: {error}"}
        write_record(options.output / "gpu_table.json", {"rows": rows})
        (options.output / "gpu_table.txt").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
