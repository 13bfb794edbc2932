"""Autocast: which operations of a plan run in 16 bits.

Weights are cast in every forward (no cache of casts), so that each micro-batch and each recomputation is independent.
Backward runs outside of autocast, with the dtypes of forward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from stagewright.spec.plan import Plan


def autocast_of(plan: Plan, device: torch.device) -> AbstractContextManager[Any]:
    """Return the autocast context of a plan's forwards and losses."""
    dtype = torch_autocast_dtype(plan)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype, cache_enabled=False)


def torch_autocast_dtype(plan: Plan) -> torch.dtype | None:
    """Return the dtype of a plan's autocast operations; None without autocast."""
    return None if plan.autocast_dtype is None else getattr(torch, plan.autocast_dtype)
