"""Measure codecs on real tensors: relative error, size, time to encode and to decode."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

import torch

from stagewright.codecs.choose import Cost
from stagewright.codecs.registry import get

__all__ = ["copy_seconds", "measure_codec", "measure_codecs", "relative_error"]


def relative_error(values: torch.Tensor, again: torch.Tensor) -> float:
    """Root mean square of the difference over that of the values; infinite where it is not a number."""
    if not values.numel():
        return 0.0
    scale = float(values.double().norm())
    found = float((again.double() - values.double()).norm())
    if found != found:
        return float("inf")
    return found / scale if scale > 0 else (0.0 if found == 0 else float("inf"))


def measure_codec(name: str, values: torch.Tensor, repeats: int = 5) -> Cost:
    """What a codec does to a tensor; buffers are made beforehand, as a link that is set up has them."""
    codec = get(name)
    values = values.detach().contiguous()
    message = codec.encode(values, checked=False)
    again = codec.decode(message, values.shape, values.dtype, checked=False)
    return Cost(
        codec=name,
        raw_bytes=values.numel() * values.element_size(),
        num_bytes=message.numel(),
        error=relative_error(values, again),
        encode_s=_median_s(lambda: codec.encode(values, out=message, checked=False), values, repeats),
        decode_s=_median_s(
            lambda: codec.decode(message, values.shape, values.dtype, out=again, checked=False), values, repeats
        ),
    )


def measure_codecs(names: Iterable[str], values: torch.Tensor, repeats: int = 5) -> list[Cost]:
    """The same for several."""
    return [measure_codec(name, values, repeats) for name in names]


def copy_seconds(values: torch.Tensor, repeats: int = 5) -> float:
    """A copy of the tensor on its device: what every codec is held against."""
    target = torch.empty_like(values)
    return _median_s(lambda: target.copy_(values), values, repeats)


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
            begun = time.perf_counter()
            run()
            times.append(time.perf_counter() - begun)
    return statistics.median(times)
