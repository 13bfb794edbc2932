"""Which kernels do the work of the block codecs: numba's on a CPU, triton's on a GPU, or plain torch.

All give the same bytes. What is not installed is not used: numba comes with ``pip install stagewright[fast]``, triton
with torch's builds for CUDA. ``STAGEWRIGHT_CODEC_KERNELS=torch`` leaves both out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

__all__ = ["decoder", "encoder", "kernel_names", "plain_torch"]

VARIABLE = "STAGEWRIGHT_CODEC_KERNELS"
_off = 0


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Work with plain torch inside; for comparing."""
    global _off
    _off += 1
    try:
        yield
    finally:
        _off -= 1


@lru_cache(maxsize=1)
def kernel_names() -> dict[str, str]:
    """For each kind of device, what does the work there."""
    if os.environ.get(VARIABLE) == "torch":
        return {"cpu": "torch", "cuda": "torch"}
    has = {name: importlib.util.find_spec(name) is not None for name in ("numba", "triton")}
    return {"cpu": "numba" if has["numba"] else "torch", "cuda": "triton" if has["triton"] else "torch"}


def encoder(values: torch.Tensor) -> Callable[..., None] | None:
    """The kernel for a tensor, if there is one."""
    found = _module(values.device.type, values.numel())
    return found.encode if found is not None else None


def decoder(payload: torch.Tensor, dtype: torch.dtype) -> Callable[..., None] | None:
    """The kernel for a message, if there is one."""
    found = _module(payload.device.type, payload.numel())
    return found.decode if found is not None else None


def _module(device: str, size: int) -> Any:
    if _off or not size:
        return None
    if device == "cpu" and kernel_names()["cpu"] == "numba":
        from stagewright.codecs.kernels import numba_cpu as fast_cpu

        return fast_cpu
    if device == "cuda" and kernel_names()["cuda"] == "triton":
        from stagewright.codecs.kernels import triton_cuda as fast_cuda

        return fast_cuda
    return None
