"""When it pays to compress: what a codec costs and saves on a link, and the best of several.

    without        bytes / rate
    with           encode + ratio · bytes / rate + decode
    break-even     rate = (1 − ratio) · bytes / (encode + decode): a slower link gains, a faster one loses

Pure arithmetic; `measure` takes the times and errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["MOST_ERROR", "Cost", "best"]

MOST_ERROR = {False: 0.1, True: 0.03}
"""Largest relative error that `auto` allows, forward and backward: gradients need more care."""

CLEARLY = 0.95  # of the time without a codec: less of a gain is left alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a codec does to one tensor."""

    codec: str
    """Its name."""
    raw_bytes: int
    """The tensor's own size."""
    num_bytes: int
    """What travels, header and scales included."""
    error: float
    """Root mean square of the error over that of the tensor."""
    encode_s: float
    """Time to encode, median."""
    decode_s: float
    """Time to decode, median."""

    @classmethod
    def together(cls, costs: Sequence[Cost]) -> Cost:
        """Several tensors of one crossing: sums, and the largest error."""
        return cls(
            codec=costs[0].codec,
            raw_bytes=sum(one.raw_bytes for one in costs),
            num_bytes=sum(one.num_bytes for one in costs),
            error=max(one.error for one in costs),
            encode_s=sum(one.encode_s for one in costs),
            decode_s=sum(one.decode_s for one in costs),
        )

    @property
    def ratio(self) -> float:
        """Bytes that travel over bytes without a codec."""
        return self.num_bytes / self.raw_bytes if self.raw_bytes else 1.0

    @property
    def break_even_rate(self) -> float:
        """Bytes a second of the link below which it pays; 0 where it never does."""
        spent = self.encode_s + self.decode_s
        saved = self.raw_bytes - self.num_bytes
        return 0.0 if saved <= 0 else float("inf") if spent <= 0 else saved / spent

    def seconds(self, rate: float) -> float:
        """From the sender's tensor to the receiver's, on a link of so many bytes a second."""
        return self.encode_s + self.num_bytes / rate + self.decode_s

    def pays(self, rate: float) -> bool:
        """Whether a link of that rate gains."""
        return rate < self.break_even_rate

    def to_dict(self) -> dict[str, Any]:
        """As JSON knows it."""
        return {**asdict(self), "ratio": self.ratio, "break_even_rate": self.break_even_rate}


def best(costs: Iterable[Cost], rate: float, most_error: float) -> Cost | None:
    """The quickest of those whose error is allowed; None where leaving the link alone is as good."""
    allowed = [one for one in costs if one.error <= most_error and one.pays(rate)]
    if not allowed:
        return None
    quickest = min(allowed, key=lambda one: one.seconds(rate))
    return quickest if quickest.seconds(rate) < CLEARLY * quickest.raw_bytes / rate else None
