"""Time of single kernels on an accelerator, from their shapes.

A matrix product takes the longest of its arithmetic, its bytes and its latency:

    arithmetic   tiles of the output are computed in waves over the multiprocessors; a tile's rate falls for a short
                 inner dimension (prologue and epilogue); the library picks the tile that is fastest
    bytes        operands and result once, at the share of the bandwidth that kernels reach
    latency      a kernel of no work

Where the result is added to an accumulated gradient, its bytes come on top: they move at the end of a tile.

The constants are fitted on a measured grid of kernels (`benchmarks/kernel_grid.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from stagewright.analytic.hardware.devices import Accelerator

# Rows and columns of output tiles that matrix libraries use, with their share of the best tile's rate.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 1.0), (128, 64, 0.92), (64, 128, 0.92), (64, 64, 0.78))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConstants:
    """What data sheets do not say. Fitted on the H200 grid (docs/measured/kernel_grid_h200.json)."""

    inner_overhead: float = 162.0
    """Length of the inner dimension that a tile's prologue and epilogue cost."""
    latency_s: float = 2.2e-6
    """Time of a matrix product without work."""
    split_s: float = 1.5e-6
    """Time of adding up a product whose inner dimension is split."""
    bandwidth_share: float = 0.80
    """Share of the memory bandwidth that streaming kernels reach."""
    stream_latency_s: float = 1.2e-6
    """Time of a streaming kernel without work."""
    half_length: float = 600.0
    """Sequence length at which fused attention reaches half of its rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Times of kernels on one accelerator."""

    device: Accelerator
    precision: str = "bfloat16"
    fused_attention: bool = True
    """Whether attention is the vendor's newest kernel (cuDNN, FlashAttention-3) instead of FlashAttention-2."""
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
                # A partly filled wave takes as long as a full one, except in persistent kernels (since Hopper), which
                # fill the last wave with parts of tiles; but a product takes at least one wave.
                waves = max(1.0, tiles * split / device.num_sms)
                waves += device.wave_rounding * (math.ceil(waves) - waves)
                length = inner / split + constants.inner_overhead
                time = waves * 2.0 * tile_rows * tile_columns * length / (rate * efficiency)
                if split > 1:
                    time += constants.split_s + batch * rows * columns * 4.0 * split / device.bandwidth_bytes_per_s
                seconds = min(seconds, time)
        num_bytes = batch * ((rows + columns) * inner + rows * columns) * self.item_bytes
        bandwidth = device.bandwidth_bytes_per_s * constants.bandwidth_share
        # Adding to an accumulated gradient reads and writes it at the end of each tile, when no products run.
        added = batch * rows * columns * max(0, out_bytes - self.item_bytes) / bandwidth
        return max(seconds, num_bytes / bandwidth) + added + constants.latency_s

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
        device, constants = self.device, self.constants
        flops = 2.0 * samples * heads * queries * keys * (key_width + value_width)
        if causal:
            flops /= 2
        # Backward recomputes the scores: five products instead of two.
        flops *= 2.5 if backward else 1.0
        share = (device.attention_share if self.fused_attention else device.flash_share)[1 if backward else 0]
        # A thread block handles 128 queries of one head; few of them leave multiprocessors idle. Causal masks leave
        # blocks of unequal length, which counts for short sequences.
        blocks = samples * heads * math.ceil(queries / 128)
        fill = blocks / (blocks + device.num_sms)
        narrow = 1 - (1 - (0.73 if self.fused_attention else 0.88)) * max(0.0, 128 - value_width) / 64
        wide = 0.85 if key_width > 128 else 1.0
        rate = device.flops(self.precision) * share * fill * narrow * wide * queries / (queries + constants.half_length)
        num_bytes = (4 if not backward else 9) * samples * heads * max(queries, keys) * value_width * self.item_bytes
        moved = num_bytes / (device.bandwidth_bytes_per_s * constants.bandwidth_share)
        return max(flops / rate, moved) + constants.latency_s * (3 if backward else 1)

    def stream_s(self, num_bytes: float, launches: int = 1) -> float:
        """Return the time of memory-bound kernels that read and write so many bytes together."""
        rate = self.device.bandwidth_bytes_per_s * self.constants.bandwidth_share
        return num_bytes / rate + launches * self.constants.stream_latency_s
