"""Time of single kernels on an accelerator, from their shapes.

A matrix product takes the longest of its arithmetic, its bytes and its latency:

    arithmetic   tiles of the output are computed in waves over the multiprocessors; a tile's rate falls for a short
                 inner dimension (prologue and epilogue); the library picks the tile that is fastest
    bytes        operands and result once, at the share of the bandwidth that kernels reach
    latency      a kernel of no work

The constants are fitted on a measured grid of kernels (`benchmarks/kernel_grid.py`, `benchmarks/fit_kernels.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from stagewright.analytic.devices import Accelerator

# Rows and columns of output tiles that matrix libraries use, with their share of the best tile's rate.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.80), (64, 128, 0.80), (64, 64, 0.60))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConstants:
    """What data sheets do not say. Fitted on the H200 grid (docs/measured/kernel_grid_h200.json)."""

    quantization: float = 0.6
    """How much of the last, partly filled wave counts: 1 all of it, 0 nothing."""
    inner_overhead: float = 160.0
    """Length of the inner dimension that a tile's prologue and epilogue cost."""
    latency_s: float = 3.0e-6
    """Time of a kernel without work."""
    bandwidth_share: float = 0.80
    """Share of the memory bandwidth that streaming kernels reach."""
    half_bytes: float = 4e6
    """Bytes at which a streaming kernel reaches half of that share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Times of kernels on one accelerator."""

    device: Accelerator
    precision: str = "bfloat16"
    constants: KernelConstants = KernelConstants()
    _cache: dict[tuple[float, ...], float] = field(default_factory=dict, repr=False, compare=False)

    @property
    def item_bytes(self) -> int:
        """Bytes per element."""
        return 4 if self.precision == "float32" else 2

    def matmul_s(self, rows: int, columns: int, inner: int, *, batch: int = 1, out_bytes: int | None = None) -> float:
        """Return the time of `batch` products of (rows × inner) and (inner × columns)."""
        out = self.item_bytes if out_bytes is None else out_bytes
        key = (rows, columns, inner, batch, out)
        if key not in self._cache:
            self._cache[key] = self._matmul_s(rows, columns, inner, batch, out)
        return self._cache[key]

    def _matmul_s(self, rows: int, columns: int, inner: int, batch: int, out_bytes: int) -> float:
        device, constants = self.device, self.constants
        share = device.matmul_share if self.precision != "float32" else min(0.9, device.matmul_share * 1.15)
        rate = device.flops(self.precision) * share / device.num_sms
        seconds = math.inf
        for tile_rows, tile_columns, efficiency in _TILES:
            tiles = batch * math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
            for split in (1, 2, 4, 8) if tiles < device.num_sms else (1,):
                exact = tiles * split / device.num_sms
                waves = constants.quantization * math.ceil(exact) + (1 - constants.quantization) * max(1.0, exact)
                length = inner / split + constants.inner_overhead
                time = waves * 2.0 * tile_rows * tile_columns * length / (rate * efficiency)
                if split > 1:
                    time += 1e-6 + batch * rows * columns * 4.0 * split / device.bandwidth_bytes_per_s
                seconds = min(seconds, time)
        num_bytes = batch * ((rows + columns) * inner * self.item_bytes + rows * columns * out_bytes)
        moved = num_bytes / (device.bandwidth_bytes_per_s * constants.bandwidth_share)
        return max(seconds, moved) + constants.latency_s

    def attention_s(
        self,
        samples: float,
        heads: float,
        queries: int,
        keys: int,
        key_width: int,
        value_width: int,
        *,
        backward: bool,
        causal: bool = True,
    ) -> float:
        """Return the time of fused attention."""
        device = self.device
        flops = 2.0 * samples * heads * queries * keys * (key_width + value_width)
        if causal:
            flops /= 2
        # Backward recomputes the scores: five products instead of two.
        flops *= 2.5 if backward else 1.0
        share = device.attention_share[1 if backward else 0]
        # A thread block handles 128 queries of one head; few of them leave multiprocessors idle.
        blocks = samples * heads * math.ceil(queries / 128)
        waves = max(1.0, blocks / device.num_sms)
        fill = (blocks / device.num_sms) / (0.5 * math.ceil(waves) + 0.5 * waves)
        narrow = min(1.0, (key_width + value_width) / 2 / 128 * 0.35 + 0.65)
        rate = device.flops(self.precision) * share * fill * narrow
        num_bytes = (4 if not backward else 9) * samples * heads * max(queries, keys) * value_width * self.item_bytes
        moved = num_bytes / (device.bandwidth_bytes_per_s * self.constants.bandwidth_share)
        return max(flops / rate, moved) + self.constants.latency_s * (3 if backward else 1)

    def stream_s(self, num_bytes: float, launches: int = 1) -> float:
        """Return the time of memory-bound kernels that read and write so many bytes together."""
        constants = self.constants
        rate = self.device.bandwidth_bytes_per_s * constants.bandwidth_share
        each = num_bytes / max(1, launches)
        fill = each / (each + constants.half_bytes) if each else 1.0
        # Small tensors stay in the cache, but do not fill the device.
        return num_bytes / rate / max(fill, 0.25) + launches * constants.latency_s * 0.5
