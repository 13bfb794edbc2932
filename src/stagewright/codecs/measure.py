"""Measurements of codecs on real tensors: relative error, size, encoding and decoding time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from stagewright.codecs.cost import CodecCost
from stagewright.codecs.registry import get


def measure_codec(name: str, values: torch.Tensor, repeats: int = 5) -> CodecCost:
    """Measure a codec on a tensor, with preallocated buffers, as on a link that is set up."""
    codec = get(name)
    values = values.detach().contiguous()
    message = codec.encode(values, checked=False)
    decoded = codec.decode(message, values.shape, values.dtype, checked=False)
    return CodecCost(
        codec=name,
        raw_bytes=values.numel() * values.element_size(),
        num_bytes=message.numel(),
        error=_relative_error(values, decoded),
        encode_s=_median_s(lambda: codec.encode(values, out=message, checked=False), values, repeats),
        decode_s=_median_s(
            lambda: codec.decode(message, values.shape, values.dtype, out=decoded, checked=False), values, repeats
        ),
    )


def measure_copy(values: torch.Tensor, repeats: int = 5) -> float:
    """Measure the seconds of a copy on the tensor's device, the lower limit for every codec."""
    target = torch.empty_like(values)
    return _median_s(lambda: target.copy_(values), values, repeats)


def _relative_error(values: torch.Tensor, decoded: torch.Tensor) -> float:
    """Return the RMS of the error over the RMS of the values; infinite if the error is NaN."""
    if not values.numel():
        return 0.0
    scale = float(values.double().norm())
    error = float((decoded.double() - values.double()).norm())
    if error != error:
        return float("inf")
    return error / scale if scale > 0 else (0.0 if error == 0 else float("inf"))


def _median_s(run: Callable[[], object], values: torch.Tensor, repeats: int) -> float:
    run()
    times: list[float] = []
    for _ in range(repeats):
        if values.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            start_s = time.perf_counter()
            run()
            times.append(time.perf_counter() - start_s)
    return statistics.median(times)
