"""Sizes of ZeRO's collectives, for the engine and its forecast."""

from __future__ import annotations

_LARGEST = 8 << 20  # large enough to saturate a link
_SMALLEST = 1 << 16
_MOST_BUCKETS = 32


def bucket_bytes(parameter_bytes: int) -> int:
    """Return the size of a gradient bucket of a worker: a small part of its gradients, which ZeRO-2 does not hold."""
    return max(_SMALLEST, min(_LARGEST, parameter_bytes // _MOST_BUCKETS))
