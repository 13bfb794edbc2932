"""Measured codecs of a plan's cuts, on tensors as large as those that cross each cut.

Activations and gradients may use different codecs: an edge gets the mean of both. `auto` chooses a codec on the first
batch of a run; its forecast assumes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from stagewright.codecs.measure import measure_codec
from stagewright.profiler.profile import Profile
from stagewright.simulator.costs.link_codec import NO_CODEC, LinkCodec
from stagewright.spec.plan import Plan

_MAX_ELEMENTS = 1 << 20  # the cost of more is proportional


def link_codecs(plan: Plan, profile: Profile, cuts: Sequence[int]) -> tuple[LinkCodec, ...]:
    """Measure the codec after each stage except the last."""
    device = profile.device.partition(":")[0]
    codecs = []
    for index, cut in enumerate(cuts):
        measured = [
            measure_link_codec(
                plan.codec_of(index, backward=backward), plan.compute_dtype, profile.units[cut].crossing_bytes, device
            )
            for backward in ((False, True) if plan.training else (False,))
        ]
        codecs.append(
            LinkCodec(
                ratio=sum(codec.ratio for codec in measured) / len(measured),
                encode_s_per_byte=sum(codec.encode_s_per_byte for codec in measured) / len(measured),
                decode_s_per_byte=sum(codec.decode_s_per_byte for codec in measured) / len(measured),
            )
        )
    return tuple(codecs)


@lru_cache(maxsize=64)
def measure_link_codec(name: str, dtype: str, num_bytes: int, device: str) -> LinkCodec:
    """Measure a codec on a tensor of that many bytes, on a kind of device."""
    if name in ("none", "auto") or not num_bytes:
        return NO_CODEC
    torch_dtype: torch.dtype = getattr(torch, dtype)
    count = min(_MAX_ELEMENTS, max(64, num_bytes // torch_dtype.itemsize))
    values = torch.randn(count // 64, 64, generator=torch.Generator().manual_seed(0)).to(device, torch_dtype)
    cost = measure_codec(name, values)
    return LinkCodec(
        ratio=cost.ratio,
        encode_s_per_byte=cost.encode_s / cost.raw_bytes,
        decode_s_per_byte=cost.decode_s / cost.raw_bytes,
    )
