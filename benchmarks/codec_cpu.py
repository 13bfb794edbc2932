"""Payload rates of codecs on one pinned core, relative to memcpy, in rounds so that a slow moment affects all alike.

    python benchmarks/codec_cpu.py [--core 0] [--mebibytes 128] [--rounds 7] [--plain] [--output FILE]

The payload is the size of the uncompressed tensor. memcpy is `Tensor.copy_` into an existing buffer, like all buffers
here. The ratio is the median over rounds of memcpy's time / the codec's time. ``--plain`` also times plain torch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record import write_record
from stagewright.cluster.device import Device, available_cores, pin_process

GOALS = {
    ("block4", "encode"): 1 / 3,
    ("block4", "decode"): 2 / 3,
    ("hadamard4", "encode"): 1 / 8,
    ("hadamard4", "decode"): 1 / 8,
}
NAMES = ("bf16", "fp8", "block8", "block6", "block4", "hadamard8", "hadamard4")


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--core", type=int, default=min(available_cores()))
    parser.add_argument("--mebibytes", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("codec_cpu.json"))
    options = parser.parse_args()
    pin_process(Device.parse(f"cpu:{options.core}"))
    import torch

    from stagewright.codecs import get
    from stagewright.codecs.kernels import select as kernels

    result: dict[str, Any] = {"kernels": kernels.kernel_names()["cpu"], "mebibytes": options.mebibytes, "dtypes": {}}
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.randn(options.mebibytes * 2**20 // dtype.itemsize).to(dtype)
        size = values.numel() * values.element_size()
        target = torch.ones_like(values)
        jobs: dict[tuple[str, str], Callable[[], object]] = {("memcpy", ""): lambda: target.copy_(values)}  # noqa: B023
        for name in NAMES:
            codec = get(name)
            message = codec.encode(values, checked=False)

            def encode(codec: Any = codec, message: torch.Tensor = message, values: torch.Tensor = values) -> None:
                codec.encode(values, out=message, checked=False)

            def decode(
                codec: Any = codec, message: torch.Tensor = message, values: torch.Tensor = values, target: Any = target
            ) -> None:
                codec.decode(message, values.shape, values.dtype, out=target, checked=False)

            jobs |= {(name, "encode"): encode, (name, "decode"): decode}
            if options.plain and name in ("block4", "hadamard4"):

                def with_plain_torch(run: Callable[[], object]) -> Callable[[], object]:
                    def wrapped() -> None:
                        with kernels.plain_torch():
                            run()

                    return wrapped

                jobs |= {
                    (f"{name} plain", "encode"): with_plain_torch(encode),
                    (f"{name} plain", "decode"): with_plain_torch(decode),
                }
        times: dict[tuple[str, str], list[float]] = {key: [] for key in jobs}
        for _ in range(options.rounds + 1):
            for key, run in jobs.items():
                times[key].append(seconds(run))
        copies = times["memcpy", ""][1:]
        rows = []
        for (name, way), seconds_of_rounds in times.items():
            timed = seconds_of_rounds[1:]
            ratio = statistics.median(copy / codec for copy, codec in zip(copies, timed, strict=True))
            rate = size / statistics.median(timed) / 1e9
            rows.append({"codec": name, "way": way, "gb_per_s": rate, "of_memcpy": ratio})
            goal = GOALS.get((name, way)) if dtype is torch.float32 else None
            verdict = f"   goal {goal:.2f}: {'met' if ratio >= goal else 'missed'}" if goal else ""
            kind = str(dtype).removeprefix("torch.")
            print(f"{kind:9} {name:16} {way:6} {rate:6.2f} GB/s  {ratio:5.2f} of memcpy{verdict}")
        result["dtypes"][str(dtype).removeprefix("torch.")] = rows
        write_record(options.output, result)


if __name__ == "__main__":
    main()
