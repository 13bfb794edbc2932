"""CUDA kernels of the codecs: whether their bytes equal those of a CPU, and their rate relative to a copy.

    python benchmarks/codec_cuda.py [--output FILE]       one GPU, 1 minute; with --variants 3

    1  compile every kernel, in several processes
    2  compare bytes and values with a CPU, for many shapes and dtypes, partial blocks, NaN and Inf
    3  time each on 512 MiB of payload, and a device-to-device copy of the same size
    4  time each on [32, 128, 768] in a CUDA graph, and the same in plain torch, and sort quantization

The kernels are the ones that users run. With --variants other numbers of rows and warps are timed too; the best ones
belong at the top of ``codecs/kernels/triton_cuda.py``.

Rates count bytes read and written; a copy of n bytes reads n and writes n. Writes JSON and prints a table.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

if not torch.cuda.is_available():
    print("skipped: these kernels need a GPU, and torch finds none here")
    sys.exit(0)

from record import write_record
from stagewright import codecs
from stagewright.codecs.kernels import select as kernels, triton_cuda as fast_cuda

NAMES = ("block8", "block6", "block4", "hadamard8", "hadamard4")
PLAIN = [{"rows": rows, "num_warps": warps, "width": 0} for rows in (32, 64, 128) for warps in (4, 8)]
PLAIN += [{"rows": 32, "num_warps": 2, "width": 0}]
PLAIN += [{"rows": 0, "num_warps": warps, "width": width} for warps in (1, 4) for width in (0, 64)]
PLAIN_ENCODE, PLAIN_DECODE = fast_cuda.PLAIN_ENCODE, fast_cuda.PLAIN_DECODE
ROTATED_ENCODE, ROTATED_DECODE = fast_cuda.ROTATED_ENCODE, fast_cuda.ROTATED_DECODE
ROTATED = {
    "encode": [{"num_warps": warps, "width": width} for warps in (1, 2, 4) for width in (0, 32, 64)],
    "decode": [{"num_warps": warps, "width": width} for warps in (1, 2, 4, 8) for width in (0, 64)],
}
SMALL = (32, 128, 768)


def default_variant(name: str, way: str, dtype: torch.dtype) -> dict[str, int]:
    """Return the launch parameters that users get."""
    if name.startswith("hadamard"):
        return ROTATED_ENCODE[dtype.itemsize] if way == "encode" else ROTATED_DECODE
    return PLAIN_ENCODE if way == "encode" else PLAIN_DECODE


def variants(name: str, way: str, dtype: torch.dtype, *, every: bool) -> list[dict[str, int]]:
    """Return the default, and with ``every`` the alternatives."""
    alternatives = ROTATED[way] if name.startswith("hadamard") else PLAIN
    default = default_variant(name, way, dtype)
    return [default] + [variant for variant in alternatives if every and variant != default]


def set_variant(name: str, way: str, variant: dict[str, int]) -> None:
    kind = "ROTATED" if name.startswith("hadamard") else "PLAIN"
    by_itemsize = {2: variant, 4: variant}
    setattr(fast_cuda, f"{kind}_{way.upper()}", by_itemsize if (kind, way) == ("ROTATED", "encode") else variant)


def compile_kernels(jobs: list[tuple[str, str, torch.dtype, dict[str, int], int]]) -> None:
    """Fill Triton's cache."""
    for name, way, dtype, variant, count in jobs:
        set_variant(name, way, variant)
        codec = codecs.get(name)
        values = torch.randn(count, device="cuda").to(dtype)
        message = codec.encode(values, checked=False)
        if way == "decode":
            codec.decode(message, values.shape, dtype, checked=False)
    torch.cuda.synchronize()


def compile_all(processes: int, *, every: bool) -> float:
    start = time.perf_counter()
    jobs = []
    for name in NAMES:
        for way in ("encode", "decode"):
            for dtype in (torch.bfloat16, torch.float32, torch.float16):
                jobs += [(name, way, dtype, default_variant(name, way, dtype), count) for count in (2**20, 1001)]
                jobs += [(name, way, dtype, variant, 2**20) for variant in variants(name, way, dtype, every=every)[1:]]
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=compile_kernels, args=(jobs[index::processes],)) for index in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start


def check() -> dict[str, Any]:
    """Compare encoded bytes and decoded values of the GPU with plain torch on a CPU."""
    generator = torch.Generator().manual_seed(0)
    wrong, tried = [], 0
    shapes = [
        (1,),
        (63,),
        (64,),
        (65,),
        (7, 33),
        (3, 5, 70),
        (128, 64),
        (5, 1000),
        (16, 197, 384),
        (2**20 + 17,),
        (0, 3),
    ]
    for name in NAMES:
        codec = codecs.get(name)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for way in ("encode", "decode"):
                set_variant(name, way, default_variant(name, way, dtype))
            for shape in shapes:
                for kind in ("normal", "heavy", "broken", "tiny", "shifted"):
                    values = torch.randn(shape, generator=generator)
                    values = values**5 if kind == "heavy" else values * 1e-33 if kind == "tiny" else values
                    values = values * 1e-3 + 7.7 if kind == "shifted" else values
                    values = values.to(dtype)
                    if kind == "broken" and values.numel():
                        values.view(-1)[:: max(1, values.numel() // 3)] = float("inf")
                        values.view(-1)[-1] = float("nan")
                    with kernels.plain_torch():
                        expected = codec.encode(values)
                        restored = codec.decode(expected, shape, dtype)
                    message = codec.encode(values.cuda())
                    decoded = codec.decode(message, shape, dtype).cpu()
                    tried += 1
                    same_bytes = torch.equal(message.cpu(), expected)
                    same_values = torch.equal(decoded.isnan(), restored.isnan()) and torch.equal(
                        decoded.nan_to_num(), restored.nan_to_num()
                    )
                    if not (same_bytes and same_values):
                        differ = int((message.cpu() != expected).sum())
                        wrong.append([name, str(dtype), list(shape), kind, differ, bool(same_values)])
    return {"tried": tried, "wrong": wrong}


def median_s(run: Callable[[], object], repeats: int = 25) -> float:
    """Return the median of single runs between CUDA events, after three warm-up runs."""
    for _ in range(3):
        run()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in marks:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks) / 1e3


def time_large(dtype: torch.dtype, *, every: bool) -> dict[str, Any]:
    count = 2**29 // dtype.itemsize
    values = torch.randn(count, device="cuda").to(dtype)
    target = torch.empty_like(values)
    size = values.numel() * values.element_size()
    copy_s = [median_s(lambda: target.copy_(values)) for _ in range(2)]
    copy_rate = 2 * size / min(copy_s)
    result: dict[str, Any] = {"copy_tb_per_s": copy_rate / 1e12, "copies_s": copy_s, "codecs": {}}
    for name in ("block8", "block4", "hadamard8", "hadamard4"):
        if name == "hadamard8" and dtype is torch.float32:
            continue
        codec = codecs.get(name)
        message = codec.encode(values, checked=False)
        for way in ("encode", "decode"):
            rows = []
            for variant in variants(name, way, dtype, every=every):
                set_variant(name, way, variant)

                def run(codec: Any = codec, way: str = way, message: torch.Tensor = message) -> None:
                    if way == "encode":
                        codec.encode(values, out=message, checked=False)
                    else:
                        codec.decode(message, values.shape, values.dtype, out=target, checked=False)

                seconds = median_s(run)
                rate = (size + message.numel()) / seconds
                rows.append({**variant, "seconds": seconds, "share_of_copy": rate / copy_rate})
            rows[1:] = sorted(rows[1:], key=lambda row: row["seconds"])
            result["codecs"].setdefault(name, {})[way] = rows
    return result


def time_small() -> dict[str, Any]:
    """Return microseconds per call, from a graph of 40 calls on 40 tensors, so that none is cached."""
    result: dict[str, Any] = {}
    inputs = [torch.randn(SMALL, device="cuda").bfloat16() for _ in range(40)]
    for name in ("block8", "block4", "hadamard8", "hadamard4"):
        codec = codecs.get(name)
        for way in ("encode", "decode"):
            set_variant(name, way, default_variant(name, way, torch.bfloat16))
        messages = [codec.encode(x, checked=False) for x in inputs]
        targets = [torch.empty_like(x) for x in inputs]
        for way in ("encode", "decode"):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for x, message, target in zip(inputs, messages, targets, strict=True):
                    if way == "encode":
                        codec.encode(x, out=message, checked=False)
                    else:
                        codec.decode(message, SMALL, torch.bfloat16, out=target, checked=False)
            result.setdefault(name, {})[f"{way}_us"] = median_s(graph.replay) / 40 * 1e6
    copies = torch.cuda.CUDAGraph()
    targets = [torch.empty_like(x) for x in inputs]
    with torch.cuda.graph(copies):
        for x, target in zip(inputs, targets, strict=True):
            target.copy_(x)
    result["copy"] = {"copy_us": median_s(copies.replay) / 40 * 1e6}
    for name in ("block4", "sort3+1"):
        with kernels.plain_torch():
            codec = codecs.get(name)
            message = codec.encode(inputs[0], checked=False)
            result[f"{name} in plain torch"] = {
                "encode_us": median_s(lambda: codec.encode(inputs[0], checked=False)) * 1e6,  # noqa: B023
                "decode_us": median_s(lambda: codec.decode(message, SMALL, torch.bfloat16, checked=False)) * 1e6,  # noqa: B023
            }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("codec_cuda.json"), help="where to write the figures")
    parser.add_argument("--variants", action="store_true", help="also time other launch parameters")
    parser.add_argument("--processes", type=int, default=8, help="processes that compile")
    options = parser.parse_args()
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}

    def save() -> None:
        write_record(options.output, result)

    result["compile_s"] = compile_all(options.processes, every=options.variants)
    print(f"compiled in {result['compile_s']:.0f} s", flush=True)
    result["check"] = check()
    save()
    print(f"checked: {result['check']['tried']} tensors, wrong: {len(result['check']['wrong'])}", flush=True)
    for row in result["check"]["wrong"][:8]:
        print("  wrong", row)
    for dtype in (torch.bfloat16, torch.float32):
        key = str(dtype).removeprefix("torch.")
        result[key] = time_large(dtype, every=options.variants)
        save()
        print(f"{key}: copy {result[key]['copy_tb_per_s']:.2f} TB/s")
        for name, ways in result[key]["codecs"].items():
            for way, rows in ways.items():
                others = ", ".join(
                    "/".join(str(v) for k, v in row.items() if k not in ("seconds", "share_of_copy"))
                    + f" {100 * row['share_of_copy']:.0f}"
                    for row in rows[1:5]
                )
                print(f"  {name:10} {way} {100 * rows[0]['share_of_copy']:5.1f} % of copy   {others}")
    result["small"] = time_small()
    save()
    for name, row in result["small"].items():
        print(f"  {list(SMALL)} bf16 {name}: " + ", ".join(f"{key} {value:.1f}" for key, value in row.items()))


if __name__ == "__main__":
    main()
