"""Fit a link to message times: latency and bandwidth of t(n) = latency + n / bandwidth.

The latency is that of the smallest message, as measured. The bandwidth is fitted to the larger ones with the latency
fixed; errors are relative, otherwise the largest message alone would decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stagewright.cluster.cluster import Link

_LARGE_BYTES = 256 * 1024  # above this size bandwidth dominates


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPoint:
    """The time of messages of one size."""

    num_bytes: int
    median_s: float
    """Median time one way."""
    spread_s: float
    """Interquartile range."""
    num_messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """A link and the measurements behind it."""

    link: Link
    points: tuple[LinkPoint, ...]
    error: float
    """Largest relative error of the fit for large messages."""
    pinned: bool
    """Whether both ends were pinned to separate cores."""
    backend: str = "gloo"
    collective: Link | None = None
    """Link as seen by one step of a collective; None: not measured."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def fit_link(points: Sequence[LinkPoint], *, pinned: bool = False, backend: str = "gloo") -> MeasuredLink:
    """Fit a link to the points, rounded to four significant digits."""
    points = sorted(points, key=lambda point: point.num_bytes)
    assert len(points) >= 2, "a line needs two sizes"
    smallest = points[0]
    large = [point for point in points[1:] if point.num_bytes >= _LARGE_BYTES] or points[-1:]
    # Least squares of (t - latency - n·b) / t over b, the seconds a byte; t ≤ latency would make b negative.
    above = sum(point.num_bytes * max(0.0, point.median_s - smallest.median_s) / point.median_s**2 for point in large)
    below = sum((point.num_bytes / point.median_s) ** 2 for point in large)
    seconds_per_byte = above / below if above > 0 else large[-1].median_s / large[-1].num_bytes
    latency_s = max(0.0, smallest.median_s - smallest.num_bytes * seconds_per_byte)
    link = Link(bandwidth_bytes_per_s=_rounded(1 / seconds_per_byte), latency_s=_rounded(latency_s))
    error = max(abs(link.message_s(point.num_bytes) / point.median_s - 1) for point in large)
    return MeasuredLink(link=link, points=tuple(points), error=error, pinned=pinned, backend=backend)


def fit_collective(points: Sequence[LinkPoint]) -> Link:
    """Fit the link of a collective's step to half the times of all-reduces between two devices.

    On a ring of two, an all-reduce of n bytes takes two steps of n / 2 bytes: 2 · latency + n / bandwidth.
    """
    half = fit_link(points).link
    return Link(bandwidth_bytes_per_s=_rounded(half.bandwidth_bytes_per_s / 2), latency_s=half.latency_s)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
