"""Selection of the block codecs' kernels: numba on a CPU, Triton on a GPU, otherwise plain torch.

All produce the same bytes. Packages that are not installed are not used: numba comes with
``pip install stagewright[fast]``, Triton with torch's CUDA builds. ``STAGEWRIGHT_CODEC_KERNELS=torch`` disables both.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

VARIABLE = "STAGEWRIGHT_CODEC_KERNELS"
_disabled = 0


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Use plain torch inside the context, for comparisons."""
    global _disabled
    _disabled += 1
    try:
        yield
    finally:
        _disabled -= 1


@lru_cache(maxsize=1)
def kernel_names() -> dict[str, str]:
    """Return the kernels' package for each device type."""
    if os.environ.get(VARIABLE) == "torch":
        return {"cpu": "torch", "cuda": "torch"}
    installed = {name: importlib.util.find_spec(name) is not None for name in ("numba", "triton")}
    return {"cpu": "numba" if installed["numba"] else "torch", "cuda": "triton" if installed["triton"] else "torch"}


def encoder(values: torch.Tensor) -> Callable[..., None] | None:
    """Return the encoding kernel for a tensor; None: use plain torch."""
    module = _module(values.device.type, values.numel())
    return module.encode if module is not None else None


def decoder(payload: torch.Tensor, dtype: torch.dtype) -> Callable[..., None] | None:
    """Return the decoding kernel for a payload; None: use plain torch."""
    module = _module(payload.device.type, payload.numel())
    return module.decode if module is not None else None


def _module(device: str, size: int) -> Any:
    if _disabled or not size:
        return None
    if device == "cpu" and kernel_names()["cpu"] == "numba":
        from stagewright.codecs.kernels import numba_cpu

        return numba_cpu
    if device == "cuda" and kernel_names()["cuda"] == "triton":
        from stagewright.codecs.kernels import triton_cuda

        return triton_cuda
    return None
