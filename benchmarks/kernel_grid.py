"""Time of a grid of kernels on the GPU at hand: the measurements behind the analytic forecast.

    python benchmarks/kernel_grid.py [--output FILE]       one GPU, 2 minutes

    matmul      the three products of a linear layer: forward (x Wᵀ), input gradient (dy W), weight gradient (dyᵀ x)
    attention   causal scaled-dot-product attention, forward and backward
    memory      norms, activations, rotary embedding, embedding, cross-entropy, optimizer, copies, host-device copies
    host        time the host needs to enqueue a kernel, a linear layer's forward and backward

Each time is that of a burst of calls between two CUDA events, so launches overlap with kernels as in training; the
median of three bursts. `sustained` repeats one matrix product for seconds: the clock drops under load. Writes JSON;
The constants of `stagewright.analytic.hardware.kernels` are fitted on such a file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch.nn import functional

if not torch.cuda.is_available():
    print("skipped: kernels are timed on a GPU, and torch finds none here")
    sys.exit(0)

from record import write_record

TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
# Output and input width of linear layers, whole and divided over tensor parallel ranks.
LINEARS = (
    (128, 1024), (256, 1024), (1024, 1024), (2048, 1024), (4096, 1024), (8192, 1024), (1024, 4096), (1024, 512),
    (256, 2048), (512, 2048), (768, 2048), (2048, 256), (2048, 512), (2048, 2048), (3072, 2048), (8192, 2048),
    (16384, 2048), (2048, 8192), (3072, 3072), (4096, 4096), (6144, 4096), (14336, 4096), (28672, 4096), (4096, 14336),
    (4608, 12288), (12288, 1536), (6144, 12288), (12288, 6144), (8192, 8192), (10240, 8192), (28672, 8192),
    (8192, 28672), (32000, 1024), (32000, 2048), (128256, 4096), (6400, 12288),
)  # fmt: skip
FEW_LINEARS = ((1024, 1024), (4096, 1024), (2048, 2048), (8192, 2048), (4096, 4096), (14336, 4096), (8192, 8192))
FEW_TOKENS = (512, 2048, 8192)
# Samples, heads, sequence length, head width.
ATTENTIONS = (
    (1, 16, 1024, 64), (2, 16, 1024, 64), (16, 16, 1024, 64), (1, 4, 2048, 64), (1, 32, 2048, 64), (8, 32, 2048, 64),
    (1, 2, 4096, 64), (1, 8, 4096, 64), (4, 8, 4096, 64), (1, 32, 4096, 64), (1, 8, 4096, 128), (1, 32, 4096, 128),
    (4, 32, 4096, 128), (1, 12, 2048, 128), (4, 8, 2048, 96), (1, 16, 8192, 128), (1, 8, 32768, 128),
    (2, 32, 2048, 128),
)  # fmt: skip
SIZES = (2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28)
MAX_FLOPS = 6e12
BURST_S = 4e-3


def burst_s(run: Callable[[], object]) -> float:
    """Return the time of one call in a burst: the median of three bursts of at least 4 ms."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    calls = min(100, max(2, int(BURST_S / max(1e-7, start.elapsed_time(end) / 1e3))))
    times = []
    for _ in range(3):
        torch.cuda._sleep(180_000 * calls)  # the host enqueues ahead, so that its time does not count
        start.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times)


def graph_s(run: Callable[[], object], calls: int = 40) -> float:
    """Return the time of one call inside a CUDA graph, where no host time counts."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return burst_s(graph.replay) / calls


def matmuls(dtype: torch.dtype, linears: Any, tokens: Any, label: str) -> Iterator[dict[str, Any]]:
    for out, inner in linears:
        weight = torch.randn(out, inner, device="cuda").to(dtype)
        for rows in tokens:
            if 2.0 * rows * out * inner > MAX_FLOPS or rows * out > 2**31:
                continue
            x = torch.randn(rows, inner, device="cuda").to(dtype)
            dy = torch.randn(rows, out, device="cuda").to(dtype)
            runs = {"forward": lambda: x @ weight.T, "input": lambda: dy @ weight, "weight": lambda: dy.T @ x}
            small = 2.0 * rows * out * inner < 2e10
            for way, run in runs.items():
                seconds = graph_s(run) if small else burst_s(run)
                shape = {"tokens": rows, "out": out, "inner": inner}
                yield {"kind": "matmul", "way": way, "dtype": label, **shape, "seconds": seconds}


def attentions() -> Iterator[dict[str, Any]]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for samples, heads, length, width in ATTENTIONS:
        shape = {"samples": samples, "heads": heads, "length": length, "head_width": width}
        q, k, v = (
            torch.randn(samples, heads, length, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            name = backend.name.lower().removesuffix("_attention")
            try:
                with sdpa_kernel(backend):
                    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                    gradient = torch.randn_like(out)
                    with torch.no_grad():
                        forward = burst_s(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True))
                    backward = burst_s(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True))
            except RuntimeError as error:
                print(f"  {name}: {str(error).splitlines()[0]}")
                continue
            for way, seconds in (("forward", forward), ("backward", backward)):
                yield {
                    "kind": "attention",
                    "way": way,
                    "backend": name,
                    "dtype": "bfloat16",
                    **shape,
                    "seconds": seconds,
                }


def memory_kernels() -> Iterator[dict[str, Any]]:
    """Time kernels that are limited by memory; `bytes` is what each must read and write."""

    def row(
        name: str, count: int, num_bytes: float, run: Callable[[], object], *, graph: bool = False
    ) -> dict[str, Any]:
        seconds = graph_s(run) if graph and count <= 2**22 else burst_s(run)
        return {"kind": "memory", "name": name, "elements": count, "bytes": num_bytes, "seconds": seconds}

    for count in SIZES:
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(count, device="cuda").to(dtype)
            y = torch.empty_like(x)
            item, label = dtype.itemsize, str(dtype).removeprefix("torch.")
            yield row(f"copy {label}", count, 2 * item * count, lambda: y.copy_(x), graph=True)
            yield row(f"add {label}", count, 3 * item * count, lambda: torch.add(x, x, out=y), graph=True)
    for rows, width in ((2048, 1024), (16384, 1024), (4096, 4096), (8192, 8192), (4096, 12288)):
        count = rows * width
        x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        z = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.ones(width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        functions: dict[str, tuple[Callable[[], torch.Tensor], int, int]] = {
            # forward: reads + writes; backward likewise, in units of one tensor of 16 bits
            "layer_norm": (lambda: functional.layer_norm(x, (width,), weight, weight), 2, 4),
            "rms_norm": (lambda: functional.rms_norm(x, (width,), weight), 2, 4),
            "gelu": (lambda: functional.gelu(x), 2, 3),
            "silu": (lambda: functional.silu(x), 2, 3),
            "silu_mul": (lambda: functional.silu(x) * z, 5, 8),
            "dropout": (lambda: functional.dropout(x, 0.1), 2, 3),
            "residual": (lambda: x + z, 3, 0),
            "softmax": (lambda: functional.softmax(x, -1), 2, 3),
        }
        for name, (function, forward, backward) in functions.items():
            with torch.no_grad():
                yield row(f"{name} forward {rows}x{width}", count, 2 * forward * count, function)
            if backward:
                out, gradient = function(), torch.randn_like(x)
                inputs = [t for t in (x, z, weight) if _reaches(out, t)]

                def run(out: torch.Tensor = out, inputs: Any = inputs, gradient: torch.Tensor = gradient) -> object:
                    return torch.autograd.grad(out, inputs, gradient, retain_graph=True)

                yield row(f"{name} backward {rows}x{width}", count, 2 * backward * count, run)
    for rows, vocabulary in ((4096, 32000), (16384, 32000), (4096, 128256), (8192, 50304)):
        count = rows * vocabulary
        logits = torch.randn(rows, vocabulary, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(vocabulary, (rows,), device="cuda")
        loss = functional.cross_entropy(logits.float(), labels)
        with torch.no_grad():
            name = f"cross_entropy forward {rows}x{vocabulary}"
            yield row(name, count, 14 * count, lambda: functional.cross_entropy(logits.float(), labels))
        name = f"cross_entropy backward {rows}x{vocabulary}"
        yield row(name, count, 14 * count, lambda: torch.autograd.grad(loss, logits, retain_graph=True))
        for width in (1024, 4096):
            table = torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            out = functional.embedding(labels, table)
            gradient = torch.randn_like(out)
            size = 4 * rows * width
            with torch.no_grad():
                name = f"embedding forward {rows}x{width}"
                yield row(name, rows * width, size, lambda: functional.embedding(labels, table))
            name = f"embedding backward {rows}x{width} of {vocabulary}"
            size += 2 * vocabulary * width
            yield row(name, rows * width, size, lambda: torch.autograd.grad(out, table, gradient, retain_graph=True))
    for dtype in (torch.bfloat16, torch.float32):
        for count in (2**24, 2**27):
            parameter = torch.nn.Parameter(torch.zeros(count, device="cuda", dtype=dtype))
            parameter.grad = torch.zeros_like(parameter)
            label = str(dtype).removeprefix("torch.")
            for fused in (True, False):
                optimizer = torch.optim.AdamW([parameter], fused=fused, foreach=not fused)
                name = f"adamw {'fused' if fused else 'foreach'} {label}"
                yield row(name, count, 7 * dtype.itemsize * count, optimizer.step)
    for count in (2**20, 2**27):
        pinned = torch.empty(count, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(count, dtype=torch.uint8, device="cuda")
        yield row("host to device", count, count, lambda: there.copy_(pinned, non_blocking=True))
        yield row("device to host", count, count, lambda: pinned.copy_(there, non_blocking=True))


def _reaches(out: torch.Tensor, source: torch.Tensor) -> bool:
    found = torch.autograd.grad(out, source, torch.ones_like(out), retain_graph=True, allow_unused=True)[0]
    return found is not None


def host_times() -> Iterator[dict[str, Any]]:
    """Time what the host needs for each call, with tensors so small that the GPU waits."""
    x = torch.ones(8, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer = torch.nn.Linear(8, 8, device="cuda", dtype=torch.bfloat16)

    def wall(run: Callable[[], object], calls: int = 1000) -> float:
        run()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / calls

    def chain() -> None:
        out = x
        for _ in range(50):
            out = layer(out)
        out.backward(x.detach())

    def adds() -> None:
        out = x
        for _ in range(50):
            out = out + x
        out.backward(x.detach())

    with torch.no_grad():
        yield {"kind": "host", "name": "add in place", "seconds": wall(lambda: x.add_(1))}
        yield {"kind": "host", "name": "linear forward", "seconds": wall(lambda: layer(x))}
    yield {"kind": "host", "name": "linear forward and backward", "seconds": wall(chain, 20) / 50}
    yield {"kind": "host", "name": "add forward and backward", "seconds": wall(adds, 20) / 50}
    parameters = [torch.nn.Parameter(torch.zeros(8, device="cuda")) for _ in range(200)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    yield {"kind": "host", "name": "fused AdamW per tensor", "seconds": wall(optimizer.step, 50) / 200}
    yield {"kind": "host", "name": "kernel in a graph", "seconds": graph_s(lambda: x.detach().add_(1), 200)}


def sustained() -> Iterator[dict[str, Any]]:
    """Repeat a large matrix product for 4 s: its rate at the start and at the end."""
    for size in (8192,):
        x = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        time.sleep(1)
        begin, rates = time.perf_counter(), []
        while time.perf_counter() - begin < 4:
            marks[0].record()
            for _ in range(20):
                x @ x
            marks[1].record()
            torch.cuda.synchronize()
            rates.append(20 * 2 * size**3 / (marks[0].elapsed_time(marks[1]) / 1e3))
        yield {"kind": "sustained", "size": size, "first_flops": rates[0], "last_flops": statistics.median(rates[-10:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("kernel_grid.json"), help="where to write the times")
    options = parser.parse_args()
    properties = torch.cuda.get_device_properties(0)
    record: dict[str, Any] = {
        "device": properties.name,
        "num_sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "kernels": [],
    }
    torch.backends.cuda.matmul.allow_tf32 = False
    groups: list[tuple[str, Callable[[], Iterator[dict[str, Any]]]]] = [
        ("sustained", sustained),
        ("host", host_times),
        ("memory", memory_kernels),
        ("attention", attentions),
        ("matmul bfloat16", lambda: matmuls(torch.bfloat16, LINEARS, TOKENS, "bfloat16")),
        ("matmul float16", lambda: matmuls(torch.float16, FEW_LINEARS, FEW_TOKENS, "float16")),
        ("matmul float32", lambda: matmuls(torch.float32, FEW_LINEARS, FEW_TOKENS, "float32")),
    ]
    for name, group in groups:
        begin = time.perf_counter()
        rows: list[dict[str, Any]] = []
        try:
            rows += group()
        except RuntimeError as error:  # keep what was measured before
            print(f"{name} stopped: {str(error).splitlines()[0]}")
        record["kernels"] += rows
        torch.cuda.empty_cache()
        write_record(options.output, record)
        print(f"{name}: {len(rows)} times in {time.perf_counter() - begin:.1f} s", flush=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    record["kernels"] += list(matmuls(torch.float32, FEW_LINEARS, FEW_TOKENS, "tf32"))
    write_record(options.output, record)


if __name__ == "__main__":
    main()
