"""Kernel times against the measured grid, and their limits."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

from stagewright.analytic.hardware.devices import accelerators
from stagewright.analytic.hardware.kernels import Kernels

GRID = Path(__file__).parents[3] / "docs" / "measured" / "kernel_grid_h200.json"
# The grid's bursts run at a higher clock than sustained load: 0.80 of the peak instead of 0.68.
BURST = replace(accelerators()["H200"], matmul_share=0.804)


def test_matrix_products_of_the_grid() -> None:
    kernels = Kernels(device=BURST)
    errors = []
    for row in json.loads(GRID.read_text(encoding="utf-8"))["kernels"]:
        if row["kind"] != "matmul" or row["dtype"] != "bfloat16":
            continue
        tokens, out, inner = row["tokens"], row["out"], row["inner"]
        shape = {"forward": (tokens, out, inner), "input": (tokens, inner, out), "weight": (out, inner, tokens)}
        errors.append(math.log(kernels.matmul_s(*shape[row["way"]]) / row["seconds"]))
    assert len(errors) == 840
    assert statistics.mean(abs(error) for error in errors) < 0.06
    assert abs(statistics.mean(errors)) < 0.03


def test_attention_of_the_grid() -> None:
    for backend in ("flash", "cudnn"):
        kernels = Kernels(device=BURST, fused_attention=backend == "cudnn")
        errors = []
        for row in json.loads(GRID.read_text(encoding="utf-8"))["kernels"]:
            if row["kind"] != "attention" or row["backend"] != backend or row["seconds"] < 5e-4:
                continue  # shorter calls were bound by the host
            seconds = kernels.attention_s(
                row["samples"], row["heads"], row["length"], row["length"], row["head_width"], row["head_width"],
                backward=row["way"] == "backward",
            )  # fmt: skip
            errors.append(abs(math.log(seconds / row["seconds"])))
        assert len(errors) >= 7
        assert statistics.median(errors) < 0.10


def test_limits() -> None:
    kernels = Kernels(device=accelerators()["A100"])
    least = 2 * 8192**3 / 312e12
    assert least < kernels.matmul_s(8192, 8192, 8192) < least / 0.7
    assert kernels.matmul_s(1, 1, 1) >= kernels.constants.latency_s
    # 109 tiles need a second wave on 108 multiprocessors.
    full, more = (kernels.matmul_s(128 * tiles, 256, 4096) for tiles in (108, 110))
    assert more > 1.3 * full
    assert kernels.stream_s(2.039e9) > 1e-3, "not faster than the data sheet"
    single = Kernels(device=accelerators()["A100"], precision="float32")
    assert single.matmul_s(4096, 4096, 4096) > 2 * 4096**3 / 19.5e12
