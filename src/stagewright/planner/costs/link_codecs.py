"""The codecs of a plan's cuts as a forecast needs them: measured on numbers as many as cross each cut.

Messages there and gradients back may have different codecs: an edge gets the mean of both. `auto` chooses when the run
begins, from the first batch: it is forecast as none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from stagewright.codecs.measure import measure_codec
from stagewright.profiler.profile import Profile
from stagewright.simulator.costs.link_codec import NO_CODEC, LinkCodec
from stagewright.spec.plan import Plan

__all__ = ["link_codecs", "measure_link_codec"]

_MOST_ELEMENTS = 1 << 20  # more of them cost in proportion


def link_codecs(plan: Plan, profile: Profile, cuts: Sequence[int]) -> tuple[LinkCodec, ...]:
    """The codec after each stage but the last."""
    found = []
    for at, cut in enumerate(cuts):
        ways = (False, True) if plan.training else (False,)
        both = [
            measure_link_codec(
                plan.codec_of(at, backward=way),
                plan.dtype,
                profile.units[cut].crossing_bytes,
                profile.device.partition(":")[0],
            )
            for way in ways
        ]
        found.append(
            LinkCodec(
                ratio=sum(one.ratio for one in both) / len(both),
                encode_s_per_byte=sum(one.encode_s_per_byte for one in both) / len(both),
                decode_s_per_byte=sum(one.decode_s_per_byte for one in both) / len(both),
            )
        )
    return tuple(found)


@lru_cache(maxsize=64)
def measure_link_codec(name: str, dtype: str, num_bytes: int, device: str) -> LinkCodec:
    """What a codec costs on a message of so many bytes, on a device of this kind."""
    if name in ("none", "auto") or not num_bytes:
        return NO_CODEC
    kind: torch.dtype = getattr(torch, dtype)
    count = min(_MOST_ELEMENTS, max(64, num_bytes // kind.itemsize))
    values = torch.randn(count // 64, 64, generator=torch.Generator().manual_seed(0)).to(device, kind)
    cost = measure_codec(name, values)
    return LinkCodec(
        ratio=cost.ratio,
        encode_s_per_byte=cost.encode_s / cost.raw_bytes,
        decode_s_per_byte=cost.decode_s / cost.raw_bytes,
    )
