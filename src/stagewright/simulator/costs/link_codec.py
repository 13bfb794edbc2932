"""What a codec does to a message, as far as a forecast needs it: fewer bytes on the link, some time at both ends.

value ── encode ──► ratio · bytes ── link ──► decode ──► value
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stagewright.errors import UsageError

__all__ = ["NO_CODEC", "LinkCodec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCodec:
    """The costs of a codec on a link."""

    ratio: float = 1.0
    """Bytes on the link over bytes of the value: 0.5 halves them."""
    encode_s_per_byte: float = 0.0
    """Time of the sender's device for a byte of the value."""
    decode_s_per_byte: float = 0.0
    """Time of the receiver's device for a byte of the value."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ratio) and self.ratio > 0):
            raise UsageError(f"a codec's ratio of {self.ratio} is not possible: give a number above 0, 1 is no codec")
        for name, value in (("encode", self.encode_s_per_byte), ("decode", self.decode_s_per_byte)):
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{name} takes {value} s a byte, but must take 0 or more")


NO_CODEC = LinkCodec()
