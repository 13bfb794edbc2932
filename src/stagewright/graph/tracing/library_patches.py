"""Where libraries behave differently while ``torch.export`` watches, make them behave as in a plain run.

Hugging Face's models ask whether they are being exported; its mask code then builds an explicit causal mask where
eager passes ``None`` and lets attention use ``is_causal``; and it looks for packed sequences by reading values. It
collects hidden states, attentions and router logits by hooks on submodules, which a stand-in has to call. Layer drop
compares a random number with a probability even when that is 0. All of it is handled in this file alone, and only
while capturing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from stagewright.errors import CaptureError

__all__ = ["collect", "export_quirks", "num_collected", "watch_for_packing"]

_MASKS = "transformers.masking_utils"
_PACKING = "find_packed_sequence_indices"
_COLLECTING = "transformers.utils.output_capturing"


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
def export_quirks(model: nn.Module, packed: bool) -> Iterator[None]:
    """Patch what is loaded, for the time of a trace; with ``packed`` sequences their masks are traced in full."""
    with ExitStack() as stack:
        masks = sys.modules.get(_MASKS)
        asking = {sys.modules.get(type(module).__module__) for module in model.modules()} | {masks}
        for library in asking:
            for question in ("is_torchdynamo_compiling", "is_torchdynamo_exporting"):
                if hasattr(library, question):
                    stack.enter_context(mock.patch.object(library, question, return_value=False))
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


def num_collected() -> int:
    """How many values the Hugging Face model that is running has collected by hooks so far."""
    collecting = sys.modules.get(_COLLECTING)
    collector = collecting._active_collector.get() if collecting is not None else None
    return sum(len(values) for values in collector.values() if isinstance(values, list)) if collector else 0


def collect(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Call the hooks by which a Hugging Face model collects what a submodule returns."""
    for hook in list(module._forward_hooks.values()):
        if getattr(hook, "__module__", None) == _COLLECTING:
            hook(module, args, output)


def _scalar_aware(rand: Any) -> Any:
    """``torch.rand([])`` answers comparisons with 0; every other call is left alone."""

    def wrapped(*size: Any, **options: Any) -> Any:
        value = rand(*size, **options)
        return _Uniform(value) if size in (((),), ([],), ()) and value.ndim == 0 else value

    return wrapped
