"""Where libraries behave differently while ``torch.export`` watches, make them behave as in a plain run.

Hugging Face's mask code builds an explicit causal mask under export where eager passes ``None`` and lets attention use
``is_causal``; and it looks for packed sequences by reading values. Layer drop compares a random number with a
probability even when that is 0. Each is patched only while tracing, from this file alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from stagewright.errors import CaptureError

__all__ = ["export_quirks", "watch_for_packing"]

_MASKS = "transformers.masking_utils"
_PACKING = "find_packed_sequence_indices"


class _Uniform:
    """A random number that can only be compared with a probability of 0 (or less) or 1 (or more)."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def __lt__(self, probability: Any) -> bool:
        if isinstance(probability, (int, float)):
            if probability <= 0:
                return False
            if probability >= 1:
                return True
        raise CaptureError(
            f"the model skips layers at random (layer drop with probability {probability}), so its units differ from "
            "step to step; set its layerdrop to 0"
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)

    def item(self) -> _Uniform:
        return self


@contextmanager
def export_quirks(packed: bool) -> Iterator[None]:
    """Patch what is loaded, for the time of a trace; with ``packed`` sequences their masks are traced in full."""
    with ExitStack() as stack:
        masks = sys.modules.get(_MASKS)
        if hasattr(masks, "is_torchdynamo_exporting"):
            stack.enter_context(mock.patch.object(masks, "is_torchdynamo_exporting", return_value=False))
        if hasattr(masks, _PACKING) and not packed:
            stack.enter_context(mock.patch.object(masks, _PACKING, return_value=None))
        stack.enter_context(mock.patch.object(torch, "rand", _scalar_aware(torch.rand)))
        yield


@contextmanager
def watch_for_packing() -> Iterator[list[bool]]:
    """In a plain run: one entry for each time that packed sequences were looked for, whether any were found."""
    found: list[bool] = []
    masks = sys.modules.get(_MASKS)
    look = getattr(masks, _PACKING, None)
    if look is None:
        yield found
        return

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = look(*args, **kwargs)
        found.append(result is not None)
        return result

    with mock.patch.object(masks, _PACKING, watched):
        yield found


def _scalar_aware(rand: Any) -> Any:
    """``torch.rand([])`` answers comparisons with 0; every other call is left alone."""

    def wrapped(*size: Any, **options: Any) -> Any:
        value = rand(*size, **options)
        return _Uniform(value) if size in (((),), ([],), ()) and value.ndim == 0 else value

    return wrapped
