"""Cost of a codec between two stages: fewer bytes on the link, compute time at both ends.

value ── encode ──► ratio · bytes ── link ──► decode ──► value
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stagewright.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCodec:
    """Compression ratio and speed of a codec."""

    ratio: float = 1.0
    """Encoded bytes over raw bytes."""
    encode_s_per_byte: float = 0.0
    """Sender's compute time per raw byte."""
    decode_s_per_byte: float = 0.0
    """Receiver's compute time per raw byte."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ratio) and self.ratio > 0):
            raise UsageError(f"a codec's ratio of {self.ratio} is not possible: give a number above 0, 1 is no codec")
        for name, value in (("encode", self.encode_s_per_byte), ("decode", self.decode_s_per_byte)):
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{name} takes {value} s per byte, but must take 0 or more")


NO_CODEC = LinkCodec()
