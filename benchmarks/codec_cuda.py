"""The codecs' CUDA kernels: are their bytes a CPU's, and how near to a copy are they?

    python benchmarks/codec_cuda.py [--output FILE]       one GPU, a minute; with --variants three

    1  every kernel is compiled, by several processes at a time
    2  bytes and values against a CPU's, for many shapes and types, tails, NaN and Inf
    3  each is timed on 512 MiB of payload beside a device-to-device copy of the same
    4  and on [32, 128, 768] in a CUDA graph, beside torch's own operations and sort quantisation

Kernels are those that users get. With --variants other rows and warps are timed too: what is best becomes the choice at
the top of ``codecs/kernels/triton_cuda.py``.

Rates count bytes read and written; a copy of n bytes reads and writes n each. Writes JSON; prints a table last.
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
    print("left out: these are kernels for a GPU, and torch sees none here")
    sys.exit(0)

from record import write_record
from stagewright import codecs
from stagewright.codecs.kernels import select as kernels
from stagewright.codecs.kernels import triton_cuda as fast_cuda

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


def used(name: str, way: str, dtype: torch.dtype) -> dict[str, int]:
    """What users get."""
    if name.startswith("hadamard"):
        return ROTATED_ENCODE[dtype.itemsize] if way == "encode" else ROTATED_DECODE
    return PLAIN_ENCODE if way == "encode" else PLAIN_DECODE


def variants(name: str, way: str, dtype: torch.dtype, *, every: bool) -> list[dict[str, int]]:
    """What users get, and what else is tried."""
    others = ROTATED[way] if name.startswith("hadamard") else PLAIN
    mine = used(name, way, dtype)
    return [mine] + [one for one in others if every and one != mine]


def use(name: str, way: str, variant: dict[str, int]) -> None:
    kind = "ROTATED" if name.startswith("hadamard") else "PLAIN"
    both = {2: variant, 4: variant}
    setattr(fast_cuda, f"{kind}_{way.upper()}", both if (kind, way) == ("ROTATED", "encode") else variant)


def compile_some(share: list[tuple[str, str, torch.dtype, dict[str, int], int]]) -> None:
    """Fill Triton's cache."""
    for name, way, dtype, variant, count in share:
        use(name, way, variant)
        one = codecs.get(name)
        values = torch.randn(count, device="cuda").to(dtype)
        message = one.encode(values, checked=False)
        if way == "decode":
            one.decode(message, values.shape, dtype, checked=False)
    torch.cuda.synchronize()


def compile_all(processes: int, *, every: bool) -> float:
    start = time.perf_counter()
    jobs = []
    for name in NAMES:
        for way in ("encode", "decode"):
            for dtype in (torch.bfloat16, torch.float32, torch.float16):
                jobs += [(name, way, dtype, used(name, way, dtype), count) for count in (2**20, 1001)]
                jobs += [(name, way, dtype, one, 2**20) for one in variants(name, way, dtype, every=every)[1:]]
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=compile_some, args=(jobs[at::processes],)) for at in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start


def check() -> dict[str, Any]:
    """Messages and values of a GPU against a CPU's plain torch."""
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
        one = codecs.get(name)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for way in ("encode", "decode"):
                use(name, way, used(name, way, dtype))
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
                        expected = one.encode(values)
                        restored = one.decode(expected, shape, dtype)
                    message = one.encode(values.cuda())
                    found = one.decode(message, shape, dtype).cpu()
                    tried += 1
                    same = torch.equal(message.cpu(), expected)
                    alike = torch.equal(found.isnan(), restored.isnan()) and torch.equal(
                        found.nan_to_num(), restored.nan_to_num()
                    )
                    if not (same and alike):
                        differ = int((message.cpu() != expected).sum())
                        wrong.append([name, str(dtype), list(shape), kind, differ, bool(alike)])
    return {"tried": tried, "wrong": wrong}


def median_s(run: Callable[[], object], repeats: int = 25) -> float:
    """Median of single runs between events, after three to warm up."""
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
    found: dict[str, Any] = {"copy_tb_per_s": copy_rate / 1e12, "copies_s": copy_s, "codecs": {}}
    for name in ("block8", "block4", "hadamard8", "hadamard4"):
        if name == "hadamard8" and dtype is torch.float32:
            continue
        one = codecs.get(name)
        message = one.encode(values, checked=False)
        for way in ("encode", "decode"):
            rows = []
            for variant in variants(name, way, dtype, every=every):
                use(name, way, variant)

                def run(one: Any = one, way: str = way, message: torch.Tensor = message) -> None:
                    if way == "encode":
                        one.encode(values, out=message, checked=False)
                    else:
                        one.decode(message, values.shape, values.dtype, out=target, checked=False)

                seconds = median_s(run)
                rate = (size + message.numel()) / seconds
                rows.append({**variant, "seconds": seconds, "share_of_copy": rate / copy_rate})
            rows[1:] = sorted(rows[1:], key=lambda row: row["seconds"])
            found["codecs"].setdefault(name, {})[way] = rows
    return found


def time_small() -> dict[str, Any]:
    """Microseconds of one call in a graph of 40 over 40 different tensors, so that no cache holds them."""
    found: dict[str, Any] = {}
    inputs = [torch.randn(SMALL, device="cuda").bfloat16() for _ in range(40)]
    for name in ("block8", "block4", "hadamard8", "hadamard4"):
        one = codecs.get(name)
        for way in ("encode", "decode"):
            use(name, way, used(name, way, torch.bfloat16))
        messages = [one.encode(x, checked=False) for x in inputs]
        targets = [torch.empty_like(x) for x in inputs]
        for way in ("encode", "decode"):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for x, message, target in zip(inputs, messages, targets, strict=True):
                    if way == "encode":
                        one.encode(x, out=message, checked=False)
                    else:
                        one.decode(message, SMALL, torch.bfloat16, out=target, checked=False)
            found.setdefault(name, {})[f"{way}_us"] = median_s(graph.replay) / 40 * 1e6
    copies = torch.cuda.CUDAGraph()
    targets = [torch.empty_like(x) for x in inputs]
    with torch.cuda.graph(copies):
        for x, target in zip(inputs, targets, strict=True):
            target.copy_(x)
    found["copy"] = {"copy_us": median_s(copies.replay) / 40 * 1e6}
    for name in ("block4", "sort3+1"):
        with kernels.plain_torch():
            one = codecs.get(name)
            message = one.encode(inputs[0], checked=False)
            found[f"{name} in plain torch"] = {
                "encode_us": median_s(lambda: one.encode(inputs[0], checked=False)) * 1e6,  # noqa: B023
                "decode_us": median_s(lambda: one.decode(message, SMALL, torch.bfloat16, checked=False)) * 1e6,  # noqa: B023
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("codec_cuda.json"), help="where to write the figures")
    parser.add_argument("--variants", action="store_true", help="also time kernels that are not used")
    parser.add_argument("--processes", type=int, default=8, help="that compile")
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
