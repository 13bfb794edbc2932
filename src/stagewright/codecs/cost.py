"""When compression pays off: what a codec costs and saves on a link, and the cheapest of several codecs.

    without        bytes / rate
    with           encode + ratio · bytes / rate + decode
    break-even     rate = (1 − ratio) · bytes / (encode + decode): slower links gain, faster links lose

Pure arithmetic; `measure` measures times and errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MAX_ERROR = {False: 0.1, True: 0.03}
"""Largest relative error that `auto` allows in forward (False) and in backward (True): gradients are more sensitive."""

_MAX_TIME_RATIO = 0.95  # to the time without a codec; a smaller gain is not worth an error


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecCost:
    """Size, error and time of a codec on one tensor."""

    codec: str
    raw_bytes: int
    """Size without a codec."""
    num_bytes: int
    """Size of the message, including header and scales."""
    error: float
    """RMS of the error over RMS of the tensor."""
    encode_s: float
    """Median."""
    decode_s: float
    """Median."""

    @classmethod
    def combine(cls, costs: Sequence[CodecCost]) -> CodecCost:
        """Combine the tensors of one crossing: summed sizes and times, and the largest error."""
        return cls(
            codec=costs[0].codec,
            raw_bytes=sum(cost.raw_bytes for cost in costs),
            num_bytes=sum(cost.num_bytes for cost in costs),
            error=max(cost.error for cost in costs),
            encode_s=sum(cost.encode_s for cost in costs),
            decode_s=sum(cost.decode_s for cost in costs),
        )

    @property
    def ratio(self) -> float:
        """Compressed size over raw size."""
        return self.num_bytes / self.raw_bytes if self.raw_bytes else 1.0

    @property
    def break_even_rate(self) -> float:
        """Link rate in bytes/s below which the codec pays off; 0 if it never does."""
        codec_s = self.encode_s + self.decode_s
        saved_bytes = self.raw_bytes - self.num_bytes
        return 0.0 if saved_bytes <= 0 else float("inf") if codec_s <= 0 else saved_bytes / codec_s

    def transfer_s(self, rate: float) -> float:
        """Return the seconds to encode, send and decode on a link of ``rate`` bytes/s."""
        return self.encode_s + self.num_bytes / rate + self.decode_s

    def pays_off(self, rate: float) -> bool:
        """Return whether the codec saves time on a link of ``rate`` bytes/s."""
        return rate < self.break_even_rate

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {**asdict(self), "ratio": self.ratio, "break_even_rate": self.break_even_rate}


def cheapest(costs: Iterable[CodecCost], rate: float, max_error: float) -> CodecCost | None:
    """Choose the fastest codec within the error limit; None if sending raw tensors is about as fast."""
    allowed = [cost for cost in costs if cost.error <= max_error and cost.pays_off(rate)]
    if not allowed:
        return None
    fastest = min(allowed, key=lambda cost: cost.transfer_s(rate))
    return fastest if fastest.transfer_s(rate) < _MAX_TIME_RATIO * fastest.raw_bytes / rate else None
