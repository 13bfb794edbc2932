"""What the parts of the study *codecs* say of each codec, brought together. Pure.

A codec of both ways is FORWARD/BACKWARD: its bytes are those of activations there and of gradients back.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["BITS", "PUBLISHED", "MeasuredCodec", "measured_codecs", "part_name"]

BITS = {"sort12+4": 16, "sort9+3": 12, "sort6+2": 8, "sort3+1": 4}
"""What the published study called these."""

PUBLISHED: Mapping[str, Mapping[str, str]] = {
    "cifar10": {"sort12+4": "96.0 ± 0.13", "sort9+3": "95.9 ± 0.14", "sort6+2": "95.7 ± 0.03", "sort3+1": "87.1"},
    "rte": {"sort12+4": "79.6 ± 0.18", "sort9+3": "79.6 ± 0.20", "sort6+2": "79.4 ± 0.21", "sort3+1": "52.2"},
    "cola": {"sort12+4": "64.5 ± 0.48", "sort9+3": "63.93 ± 0.22", "sort6+2": "63.20 ± 0.12", "sort3+1": "0"},
}
"""Accuracy in %, Matthews × 100 for CoLA: MobileNetV2 and RoBERTa on GPUs."""


def part_name(task: str, codec: str, seed: int | None) -> str:
    """The part that trains a task with a codec; without a seed the one that proves a step of it."""
    plain = re.sub(r"[^a-z0-9.+_]+", "-", codec.replace("/", "_").lower()).strip("-")
    return f"prove-{task}-{plain}" if seed is None else f"train-{task}-{plain}-{seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCodec:
    """One codec on the links of one task."""

    codec: str
    """FORWARD or FORWARD/BACKWARD."""
    values: tuple[float, ...]
    """The metric after the last epoch, × 100, of each seed."""
    step_bytes: float
    """Bytes of a step over both links and both ways, and without a codec."""
    raw_bytes: float
    error: float | None
    """Relative error of activations and of gradients, the largest over the links; None: not a number."""
    error_backward: float | None
    codec_s: float
    """Time to encode and decode all of a step, both ways."""
    rate: float | None
    """The largest message, from tensor to tensor: bytes of the tensor a second; None: not measured."""
    plain_rate: float | None
    """The same without a codec."""
    received_rate: float | None
    """The bytes that travel for it, over the same time; None: not measured."""

    @property
    def ratio(self) -> float:
        """Bytes that travel over bytes without a codec: header and scales included, bits packed."""
        return self.step_bytes / self.raw_bytes if self.raw_bytes else 1.0

    @property
    def mean(self) -> float | None:
        """Over seeds."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        """Over seeds; None with one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def shown(self) -> str:
        """As tables have it: 95.9 ± 0.14."""
        if self.mean is None:
            return "–"
        return f"{self.mean:.1f}" + (f" ± {self.deviation:.2f}" if self.deviation is not None else "")

    @property
    def break_even_rate(self) -> float:
        """Bytes a second of the link below which it pays; 0 where it never does."""
        saved = self.raw_bytes - self.step_bytes
        return 0.0 if saved <= 0 else float("inf") if self.codec_s <= 0 else saved / self.codec_s


def measured_codecs(results: Mapping[str, Any], options: Mapping[str, Any], task: str) -> list[MeasuredCodec]:
    """Every codec of a task, in the order of the options; those of which nothing is known are left out."""
    crossing = results.get(f"crossing-{task}")
    transfer = results.get(f"transfer-{task}")
    found = []
    for codec in options["codecs"]:
        trained = [results.get(part_name(task, codec, seed)) for seed in options["seeds"]]
        values = tuple(100 * one["epochs"][-1][one["metric"]] for one in trained if one is not None)
        if crossing is None and not values:
            continue
        forward, _, backward = codec.partition("/")
        there = _rows(crossing, forward, "forward")
        back = _rows(crossing, backward or forward, "backward")
        messages = crossing["messages"] if crossing is not None else 0
        found.append(
            MeasuredCodec(
                codec=codec,
                values=values,
                # Without a codec a tensor travels as it is, without a header.
                step_bytes=messages
                * sum(one["raw_bytes" if one["codec"] == "none" else "num_bytes"] for one in (*there, *back)),
                raw_bytes=messages * sum(one["raw_bytes"] for one in (*there, *back)),
                error=_largest(there),
                error_backward=_largest(back),
                codec_s=messages * sum(one["encode_s"] + one["decode_s"] for one in (*there, *back))
                if forward != "none"
                else 0.0,
                rate=_rate(transfer, forward),
                plain_rate=_rate(transfer, "none"),
                received_rate=_received_rate(transfer, forward),
            )
        )
    return found


def _rows(crossing: Mapping[str, Any] | None, codec: str, direction: str) -> list[Mapping[str, Any]]:
    rows = [] if crossing is None else crossing["rows"]
    return [row for row in rows if row["codec"] == codec and row["direction"] == direction]


def _largest(rows: list[Mapping[str, Any]]) -> float | None:
    errors = [row["error"] for row in rows]
    return max(errors) if errors and None not in errors else None


def _rate(transfer: Mapping[str, Any] | None, codec: str) -> float | None:
    if transfer is None or codec not in transfer["codecs"]:
        return None
    return float(transfer["raw_bytes"] / max(transfer["codecs"][codec]["seconds"], 1e-9))


def _received_rate(transfer: Mapping[str, Any] | None, codec: str) -> float | None:
    rate = _rate(transfer, codec)
    if transfer is None or rate is None or codec == "none":  # without a codec a tensor travels as it is
        return rate
    return rate * float(transfer["codecs"][codec]["num_bytes"] / transfer["raw_bytes"])
