"""Patches of libraries that behave differently under ``torch.export`` than in an eager run.

Hugging Face models check whether they are being exported: the mask code then builds an explicit causal mask instead of
passing ``None`` and using ``is_causal``. It also reads tensor values to detect packed sequences. Hidden states,
attentions and router logits are collected by hooks on submodules, which an intercepted call has to run. Layer drop
compares a random number with a probability even if that is 0. Torch's own transformers compare the mask's values with a
causal mask's. All of this is handled in this file, and only during capture.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules import transformer

from stagewright.errors import CaptureError

_MASKS = "transformers.masking_utils"
_PACKING = "find_packed_sequence_indices"
_COLLECTING = "transformers.utils.output_capturing"


class _Uniform:
    """A random number that can only be compared with a probability ≤ 0 or ≥ 1."""

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
def patch_for_export(model: nn.Module, packed: bool) -> Iterator[None]:
    """Patch loaded libraries during a trace; with ``packed`` sequences the mask code is traced in full."""
    with ExitStack() as stack:
        masks = sys.modules.get(_MASKS)
        libraries = {sys.modules.get(type(module).__module__) for module in model.modules()} | {masks}
        for library in libraries:
            for name in ("is_torchdynamo_compiling", "is_torchdynamo_exporting"):
                if hasattr(library, name):
                    stack.enter_context(mock.patch.object(library, name, return_value=False))
        if hasattr(masks, _PACKING) and not packed:
            stack.enter_context(mock.patch.object(masks, _PACKING, return_value=None))
        stack.enter_context(mock.patch.object(torch, "rand", _scalar_aware(torch.rand)))
        detect = _traced_detection(transformer._detect_is_causal_mask)
        stack.enter_context(mock.patch.object(transformer, "_detect_is_causal_mask", detect))
        yield


@contextmanager
def detect_packing() -> Iterator[list[bool]]:
    """Record, during an eager run, whether each search for packed sequences found any."""
    results: list[bool] = []
    masks = sys.modules.get(_MASKS)
    search = getattr(masks, _PACKING, None)
    if search is None:
        yield results
        return

    def recorded(*args: Any, **kwargs: Any) -> Any:
        result = search(*args, **kwargs)
        results.append(result is not None)
        return result

    with mock.patch.object(masks, _PACKING, recorded):
        yield results


def count_collected() -> int:
    """Count the values that the running Hugging Face model has collected by hooks so far."""
    collecting = sys.modules.get(_COLLECTING)
    collector = collecting._active_collector.get() if collecting is not None else None
    return sum(len(values) for values in collector.values() if isinstance(values, list)) if collector else 0


def run_collecting_hooks(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Run the hooks with which a Hugging Face model collects the results of a submodule."""
    for hook in list(module._forward_hooks.values()):
        if getattr(hook, "__module__", None) == _COLLECTING:
            hook(module, args, output)


def _traced_detection(detect: Any) -> Any:
    """Make the answer to "is this mask causal?" a number of the trace.

    The code between layers passes it on to them and does not branch on it.
    """

    def wrapped(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> Any:
        if mask is None or is_causal is not None:
            return detect(mask, is_causal, size)
        length = mask.size(-2) if size is None else size
        causal = nn.Transformer.generate_square_subsequent_mask(length, device=mask.device, dtype=mask.dtype)
        return (mask == causal).all().item() if mask.size() == causal.size() else False

    return wrapped


def _scalar_aware(rand: Any) -> Any:
    """Wrap the result of ``torch.rand([])`` so that it can be compared with 0; other calls are unchanged."""

    def wrapped(*size: Any, **options: Any) -> Any:
        value = rand(*size, **options)
        return _Uniform(value) if size in (((),), ([],), ()) and value.ndim == 0 else value

    return wrapped
