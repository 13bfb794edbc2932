"""The rate of copies between a GPU and pinned memory of its host, which offloaded activations take."""

from __future__ import annotations

import time

import torch

from stagewright.cluster.cluster import Link

_COPIED_BYTES = 256 << 20
_REPEATS = 4


def measure_host_link(device: torch.device) -> Link | None:
    """Measure the slower of both directions; None on a CPU, whose memory is the host's."""
    if device.type != "cuda":
        return None
    host = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    seconds = [max(_copy_s(host, on_device, device), _copy_s(on_device, host, device)) for _ in range(_REPEATS)]
    return Link(bandwidth_bytes_per_s=_COPIED_BYTES / min(seconds[1:]), latency_s=0.0)


def _copy_s(source: torch.Tensor, target: torch.Tensor, device: torch.device) -> float:
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    return time.perf_counter() - start
