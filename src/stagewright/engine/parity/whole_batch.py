"""The loss of the whole batch in one forward pass, compared with the loss of a plan's micro-batches.

The parity check of a plan compares with a baseline on the same micro-batches. For most models the mean over
micro-batches is the loss of the whole batch. For some it is not, and such a plan trains a different function:

    in-batch negatives         micro-batches ■■■■ ■■■■ ■■■■ ■■■■     each sample has 3 negatives
                               whole batch   ■■■■■■■■■■■■■■■■        each sample has 15

Batch norm and a mean over something other than samples, such as tokens, have the same effect. Both losses are reported.
This takes one forward pass without gradients, with dropout disabled for both. There is no result if the whole batch
does not fit into memory, or if the model draws random numbers in an unknown way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from stagewright import structure
from stagewright.engine.batch.microbatch import MicroBatch
from stagewright.engine.batch.random_key import device_generators, preserve_generators, random_state
from stagewright.engine.worker.memory import held_bytes
from stagewright.graph.preserve import preserved
from stagewright.machine.cpu_offload import room_of
from stagewright.machine.host_memory import available_bytes
from stagewright.profiler.allocations import AllocationCounter
from stagewright.profiler.replay import peak_memory_increase
from stagewright.runs.result import WholeBatchLoss

THRESHOLDS = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2, "float64": 1e-8}
"""A larger relative difference is not rounding: the loss depends on which samples share a batch."""

SMALL_LOSS = 1e-2  # for smaller losses, which result from cancellation, the difference is relative to this

_Loss = Callable[[Any, Any], torch.Tensor]


def compare_whole_batch(
    model: nn.Module,
    microbatches: Sequence[MicroBatch],
    whole: MicroBatch,
    loss: _Loss,
    *,
    known_loss: float | None,
    dtype: str,
    device: torch.device,
    memory_bytes: int | None = None,
) -> WholeBatchLoss | None:
    """Compare the loss of ``whole`` with that of its ``microbatches``; the model and its random state are unchanged.

    ``known_loss``: the loss of the micro-batches, if the plain model computed it. Return None if there is no result.
    """
    try:
        with preserved(model), torch.no_grad():
            drawn, needed = _trial(model, microbatches[0], loss, device)
        if needed * whole.num_samples / microbatches[0].num_samples > _available(model, device, memory_bytes):
            return None
        before = random_state(device)
        with preserved(model), torch.no_grad(), _Deterministic(device) if drawn else nullcontext():
            split_loss = known_loss
            if drawn or known_loss is None:
                split_loss = sum(_loss_of(model, part, loss) * part.weight for part in microbatches)
        with preserved(model), torch.no_grad(), _Deterministic(device) if drawn else nullcontext():
            whole_loss = _loss_of(model, whole, loss)
            if random_state(device) != before:
                return None
    except Exception:  # out of memory, or too many samples for the model: the parity check continues without
        return None
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    assert split_loss is not None
    if not math.isfinite(whole_loss) or not math.isfinite(split_loss):
        return None
    larger, difference = max(abs(whole_loss), abs(split_loss)), abs(whole_loss - split_loss)
    return WholeBatchLoss(
        loss=whole_loss,
        loss_of_pieces=split_loss,
        pieces=len(microbatches),
        samples=max(part.num_samples for part in microbatches),
        difference=difference / larger if larger else 0.0,
        depends=difference > THRESHOLDS[dtype] * max(larger, SMALL_LOSS),
        without_dropout=drawn,
    )


def _loss_of(model: nn.Module, microbatch: MicroBatch, loss: _Loss) -> float:
    """Compute the loss with the plain model, on a copy of the inputs, which the model may change."""
    args, kwargs = structure.map_tensors(torch.clone, (microbatch.args, microbatch.kwargs))
    return float(loss(model(*args, **kwargs), microbatch.target))


def _trial(model: nn.Module, microbatch: MicroBatch, loss: _Loss, device: torch.device) -> tuple[bool, int]:
    """Return whether a micro-batch draws random numbers, and its peak memory increase in bytes."""
    before = random_state(device)
    if device.type == "cuda":
        _, needed = peak_memory_increase(lambda: _loss_of(model, microbatch, loss), device)
    else:
        with AllocationCounter() as counter:  # the process may still hold free memory of an earlier step
            _loss_of(model, microbatch, loss)
        needed = counter.peak_bytes
    return random_state(device) != before, needed


def _available(model: nn.Module, device: torch.device, limit_bytes: int | None) -> float:
    """Return the bytes that a forward pass may use: on the host half of the free memory, as other workers load too."""
    parameters = sum(p.numel() * p.element_size() for p in model.parameters() if p.device.type == device.type)
    allowed = math.inf if limit_bytes is None else limit_bytes - parameters
    if device.type == "cuda":
        return min(allowed, room_of(device) - (held_bytes(device) or 0))
    free = available_bytes()
    return allowed if free is None else min(allowed, free / 2)


_DROPOUTS = {
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d, functional.alpha_dropout,
    functional.feature_alpha_dropout, torch.dropout, torch.dropout_, torch.feature_dropout, torch.alpha_dropout,
    torch.feature_alpha_dropout,
}  # fmt: skip
_DROPOUT_ARGUMENT = {functional.scaled_dot_product_attention: 4, functional.multi_head_attention_forward: 10}
_MEANS = {torch.rand: 0.5, torch.rand_like: 0.5, torch.randn: 0.0, torch.randn_like: 0.0}


class _Deterministic(TorchFunctionMode):
    """Disable dropout and replace random numbers by their mean in all modules; batch norm stays in train mode."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._generators = device_generators(device)

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        index = _DROPOUT_ARGUMENT.get(function)
        if index is not None and len(args) > index:
            args = (*args[:index], 0.0, *args[index + 1 :])
        elif index is not None:
            kwargs = {**kwargs, "dropout_p": 0.0}
        if function in _MEANS:  # some models use these to skip layers (stochastic depth)
            with preserve_generators(self._generators):
                return function(*args, **kwargs).fill_(_MEANS[function])
        return function(*args, **kwargs)
