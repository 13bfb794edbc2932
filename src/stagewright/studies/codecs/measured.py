"""The measurements of each codec in the study *codecs*. Pure.

A codec is named FORWARD or FORWARD/BACKWARD: its bytes are those of activations forward and of gradients backward.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from stagewright.studies.framework.accuracy import AccuracyScale, accuracy_scale
from stagewright.studies.framework.rounds import SeedValues, read_trained
from stagewright.studies.parts.measurements import noise_margin, why_busy

BITS = {"sort12+4": 16, "sort9+3": 12, "sort6+2": 8, "sort3+1": 4}
"""Bits per value, by which the published study names these."""

GOAL_RATIO = 0.15
"""Of fp32 bytes."""
_COLLAPSE = 0.5  # share of the accuracy above chance that a collapse loses at least
_FEW = 0.28  # codecs with at most this share of the fp32 bytes may collapse: 8 bits and fewer

PUBLISHED: Mapping[str, Mapping[str, str]] = {
    "cifar10": {"sort12+4": "96.0 ± 0.13", "sort9+3": "95.9 ± 0.14", "sort6+2": "95.7 ± 0.03", "sort3+1": "87.1"},
    "rte": {"sort12+4": "79.6 ± 0.18", "sort9+3": "79.6 ± 0.20", "sort6+2": "79.4 ± 0.21", "sort3+1": "52.2"},
    "cola": {"sort12+4": "64.5 ± 0.48", "sort9+3": "63.93 ± 0.22", "sort6+2": "63.20 ± 0.12", "sort3+1": "0"},
}
"""Accuracy in %, Matthews × 100 for CoLA: MobileNetV2 and RoBERTa on GPUs."""


def part_name(task: str, codec: str, seed: int | None) -> str:
    """Name the part that trains a task with a codec; without a seed, the part that runs its parity check."""
    name = re.sub(r"[^a-z0-9.+_]+", "-", codec.replace("/", "_").lower()).strip("-")
    return f"prove-{task}-{name}" if seed is None else f"train-{task}-{name}-{seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCodec(SeedValues):
    """One codec on the links of one task."""

    codec: str
    step_bytes: float
    """Bytes sent per step over both links, forward and backward."""
    raw_bytes: float
    """The same without a codec."""
    error: float | None
    """Relative error of activations, the largest over the links; None: NaN or infinite."""
    error_backward: float | None
    """The same for gradients."""
    codec_s: float
    """Time to encode and decode everything that a step sends."""
    rate: float | None
    """Bytes/s of the largest tensor, from the sender's to the receiver's memory; None: not measured."""
    plain_rate: float | None
    """The same without a codec."""
    received_rate: float | None
    """Bytes/s that are actually sent for it; None: not measured."""
    margin: float = 0.1
    """Relative difference between two rates up to which they can't be told apart."""

    @property
    def is_faster_here(self) -> bool:
        """Whether a tensor arrives sooner with this codec than without, end to end, by more than the margin."""
        if self.codec == "none" or self.rate is None or self.plain_rate is None:
            return False
        return self.rate > (1 + self.margin) * self.plain_rate

    @property
    def ratio(self) -> float:
        """Compression ratio: bytes sent ÷ bytes without a codec, with headers and scales, bits packed."""
        return self.step_bytes / self.raw_bytes if self.raw_bytes else 1.0

    @property
    def break_even_rate(self) -> float:
        """Bandwidth in bytes/s below which the codec saves time; 0: never."""
        saved = self.raw_bytes - self.step_bytes
        return 0.0 if saved <= 0 else float("inf") if self.codec_s <= 0 else saved / self.codec_s


Codecs: TypeAlias = Mapping[str, Sequence[MeasuredCodec]]
"""The codecs of each task."""


def without_codec(measured: Sequence[MeasuredCodec]) -> MeasuredCodec | None:
    """Return the training without a codec, to which the others are compared; None where it is missing."""
    return next((codec for codec in measured if codec.codec == "none" and codec.mean is not None), None)


def may_collapse(codec: MeasuredCodec) -> bool:
    """Whether a codec was trained with so few bits that it may collapse."""
    return codec.mean is not None and bool(codec.raw_bytes) and codec.ratio <= _FEW


def kept_accuracy(scale: AccuracyScale, codec: MeasuredCodec, reference: MeasuredCodec) -> tuple[float, float]:
    """Return the share of the accuracy above guessing that a codec keeps, and half of its interval."""
    assert reference.mean is not None
    learned, difference = reference.mean - scale.chance, scale.difference(codec, reference)
    return 1 + difference.points / learned, difference.half_width / learned


def collapse_verdict(
    scale: AccuracyScale, codec: MeasuredCodec, reference: MeasuredCodec
) -> Literal["yes", "no", "unclear"]:
    """Say whether less than half of the accuracy above guessing is left."""
    kept, half = kept_accuracy(scale, codec, reference)
    return "yes" if kept + half < _COLLAPSE else "no" if kept - half > _COLLAPSE else "unclear"


def faster_here(results: Mapping[str, Any], measured: Sequence[MeasuredCodec]) -> tuple[list[str], str]:
    """Return the codecs that save time on this machine's link, or why that can't be told."""
    because = why_busy(results)
    return ([] if because else [codec.codec for codec in measured if codec.raw_bytes and codec.is_faster_here]), because


def goal_points(task: str) -> float:
    """Allowed loss of accuracy in points."""
    return 0.5 if task == "cifar10" else 1.0


def shown_points(points: float) -> str:
    """0.5 points, 1 point."""
    return f"{points:g} point{'s' if points != 1 else ''}"


def task_scale(
    results: Mapping[str, Any], options: Mapping[str, Any], task: str, measured: Sequence[MeasuredCodec]
) -> AccuracyScale:
    """How exactly the accuracies of a task are known."""
    samples = results.get(f"data-{task}") or {}
    return accuracy_scale(task, options["recipes"][task].metric, measured, samples.get("judged"))


def measured_codecs(results: Mapping[str, Any], options: Mapping[str, Any], task: str) -> list[MeasuredCodec]:
    """List every codec of a task that was measured or trained, in the order of the options."""
    crossing = results.get(f"crossing-{task}")
    transfer = results.get(f"transfer-{task}")
    measured = []
    for codec in options["codecs"]:
        trained = read_trained(results, options["seeds"], partial(part_name, task, codec))
        if crossing is None and not trained:
            continue
        forward, _, backward = codec.partition("/")
        forward_rows = _rows(crossing, forward, "forward")
        backward_rows = _rows(crossing, backward or forward, "backward")
        messages = crossing["messages"] if crossing is not None else 0
        rows = (*forward_rows, *backward_rows)
        measured.append(
            MeasuredCodec(
                codec=codec,
                trained=trained,
                # Without a codec a tensor is sent as it is, without a header.
                step_bytes=messages * sum(row["raw_bytes" if row["codec"] == "none" else "num_bytes"] for row in rows),
                raw_bytes=messages * sum(row["raw_bytes"] for row in rows),
                error=_largest(forward_rows),
                error_backward=_largest(backward_rows),
                codec_s=0.0 if forward == "none" else messages * sum(row["encode_s"] + row["decode_s"] for row in rows),
                rate=_rate(transfer, forward),
                plain_rate=_rate(transfer, "none"),
                received_rate=_received_rate(transfer, forward),
                margin=max(0.1, noise_margin(results)),
            )
        )
    return measured


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
    if transfer is None or rate is None or codec == "none":  # without a codec a tensor is sent as it is
        return rate
    return rate * float(transfer["codecs"][codec]["num_bytes"] / transfer["raw_bytes"])
