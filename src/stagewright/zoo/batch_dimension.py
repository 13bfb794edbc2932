"""The batch dimension of a user's example: the first, or the second, as recurrent layers and their states have it.

Layers with ``batch_first=False`` take [steps, batch, features]. A model of such layers may take its inputs the same
way, or batch first, and transpose them; and an initial state is [layers, batch, features] in any case. The model is run
with two sizes of each possibility: its layers tell which is right.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stagewright import structure
from stagewright.sequence_layers import batch_and_steps
from stagewright.zoo.list_arguments import Resize, Samples
from stagewright.zoo.model import Batch

_SIZES = (2, 3)

Seen = list[tuple[int, int] | None]
"""Batch size and steps of each call of a layer."""


def find_batch_dimension(batch: Batch, samples: Samples, module: nn.Module, resize: Resize) -> Samples:
    """Return where the samples are: the first possibility that changes the batch size of layers, if one does."""
    layers = [layer.batch_first for layer in module.modules() if isinstance(getattr(layer, "batch_first", None), bool)]
    tensors = [tensor for tensor in structure.tensors((tuple(batch.args), batch.kwargs)) if tensor.ndim]
    with_states = samples._replace(dims=(0, 1))
    has_states = any(samples.dim_of(tensor) != with_states.dim_of(tensor) for tensor in tensors)
    if samples.lists or not layers or (all(layers) and not has_states):
        return samples
    possible = [samples, *([with_states] if has_states else [])]
    if not all(layers) and tensors[0].ndim > 1 and tensors[0].shape[1]:
        possible.append(Samples(tensors[0].shape[1], frozenset(), dims=(1, 0)))
    return next((found for found in possible if _divides_batches(batch, found, module, resize)), samples)


def _divides_batches(batch: Batch, samples: Samples, module: nn.Module, resize: Resize) -> bool:
    """Whether other numbers of samples change the batch size of layers, and not the length of their sequences."""
    seen = [_run(resize(batch, samples, size), module) for size in _SIZES]
    first, second = seen
    if first is None or second is None or len(first) != len(second):
        return False
    pairs = [(one, other) for one, other in zip(first, second, strict=True) if one is not None and other is not None]
    return any(one[0] != other[0] for one, other in pairs) and all(one[1] == other[1] for one, other in pairs)


def _run(batch: Batch, module: nn.Module) -> Seen | None:
    """Run a copy of the model; return what its layers with ``batch_first`` got, or None if it fails."""
    seen: Seen = []
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        copied = copy.deepcopy(module)
        for layer in copied.modules():
            batch_first = getattr(layer, "batch_first", None)
            if isinstance(batch_first, bool):
                layer.register_forward_pre_hook(_observer(seen, batch_first=batch_first), with_kwargs=True)
        args, kwargs = structure.map_tensors(torch.clone, (batch.args, batch.kwargs))
        with torch.random.fork_rng(devices), torch.no_grad():
            copied(*args, **kwargs)
    except Exception:  # whatever the user's model raises
        return None
    return seen


def _observer(seen: Seen, *, batch_first: bool) -> Callable[..., None]:
    def observe(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = structure.leaves((args, kwargs))[:2]
        shapes = [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else () for leaf in leaves]
        seen.append(batch_and_steps(shapes, batch_first=batch_first))

    return observe
