"""Batch norm under micro-batches: whose statistics move the running ones, and when.

In both modes a micro-batch is normalised with its own mean and variance: no stage ever sees the whole batch. So the
loss of a model with batch norm depends on the size of its micro-batches, as it depends on the batch size in serial
training; compare with serial training on the same micro-batches. The modes differ in the running statistics alone:

    plain       they move once a micro-batch, m times a step, in the order in which micro-batches run
    deferred    they move once a step, with the mean and variance of the whole batch (of all replicas, if asked):
                what one serial step on the whole batch does to a first layer

A recomputed forward moves nothing in either mode (``held_statistics``). In deferred mode the module computes its
statistics as ever, but into fresh tensors with momentum 1, so that they cost no second pass over the data; counts,
means and variances are merged in float64 when the step ends (Chan, Golub, LeVeque 1983, around the running mean).
Names and tensors of ``state_dict`` stay the module's own. ``SyncBatchNorm`` merges by itself and is left alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from stagewright.engine.dropout import current_key

__all__ = ["DeferredBatchNorm", "held_statistics", "tracked_norms"]

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_held: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def tracked_norms(module: nn.Module) -> list[_BatchNorm]:
    """The batch norms in a module that have running statistics, each once."""
    return [
        one
        for one in module.modules()
        if isinstance(one, _BatchNorm) and one.track_running_stats and one.running_mean is not None
    ]


@contextmanager
def held_statistics(norms: Iterable[_BatchNorm]) -> Iterator[None]:
    """Forwards in this block are those of a recomputation: running statistics stay as they are.

    In training nothing reads the running statistics, so that others may take what is written meanwhile.
    """
    swapped: list[tuple[_BatchNorm, dict[str, Any]]] = []
    try:
        for norm in norms:
            if norm.training and norm not in _held:
                swapped.append((norm, _swap(norm, {name: _blank(norm._buffers[name]) for name in _BUFFERS})))
                _held.add(norm)
        yield
    finally:
        for norm, before in swapped:
            _held.discard(norm)
            _swap(norm, before)


@dataclass(slots=True)
class _Statistics:
    """What one forward in training mode found."""

    count: int
    """Values for each channel."""
    mean: torch.Tensor
    """Of each channel."""
    variance: torch.Tensor
    """Of each channel, unbiased: divided by ``count - 1``."""


class DeferredBatchNorm:
    """Deferred mode for every batch norm in some modules, from ``install`` to ``remove`` (or as a context)."""

    def __init__(self, *modules: nn.Module) -> None:
        unique = {norm: None for module in modules for norm in tracked_norms(module)}
        self.norms: tuple[_BatchNorm, ...] = tuple(norm for norm in unique if not isinstance(norm, nn.SyncBatchNorm))
        # For each norm and each of its calls in a forward of the model: the statistics of every micro-batch.
        self._found: dict[_BatchNorm, list[list[_Statistics]]] = {norm: [[]] for norm in self.norms}
        self._num_calls: dict[tuple[_BatchNorm, int | None], int] = {}
        self._before: dict[_BatchNorm, Any] = {}

    def __enter__(self) -> DeferredBatchNorm:
        self.install()
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def install(self) -> None:
        """Let forwards in training mode put their statistics aside."""
        for norm in self.norms:
            if norm not in self._before:
                self._before[norm] = norm.__dict__.get("forward")
                norm.__dict__["forward"] = self._deferring(norm, norm.forward)

    def remove(self) -> None:
        """Put the modules back as they were; what was not finished is dropped."""
        for norm, before in self._before.items():
            if before is None:
                del norm.__dict__["forward"]
            else:
                norm.__dict__["forward"] = before
        self._before.clear()
        self.discard()

    def discard(self) -> None:
        """Forget what has been gathered, as after a failed step."""
        self._num_calls.clear()
        for calls in self._found.values():
            for call in calls:
                call.clear()

    @torch.no_grad()
    def finish_step(self, reduce: Callable[[torch.Tensor], object] | None = None) -> None:
        """Move the running statistics once, with those of the whole batch.

        ``reduce`` adds a float64 vector over the replicas of the data axis, in place; every replica must call it with
        the same model and the same running statistics. It is called once for all norms of a device.
        """
        sums = [_sums(norm, call) for norm, calls in self._found.items() for call in calls]
        if reduce is not None and sums:
            flat = torch.cat(sums)
            reduce(flat)
            sums = list(torch.split(flat, [len(one) for one in sums]))
        moves = iter(sums)
        for norm, calls in self._found.items():
            # The shift of every call's sums is the running mean before the step.
            shift = _buffer(norm, "running_mean").to(torch.float64, copy=True)
            for _ in calls:
                _move(norm, shift, next(moves))
        self.discard()

    def _deferring(self, norm: _BatchNorm, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            if not norm.training or norm in _held:
                return forward(*args, **kwargs)
            mean = torch.zeros_like(_buffer(norm, "running_mean"))
            variance = torch.zeros_like(_buffer(norm, "running_var"))
            before = _swap(norm, {"running_mean": mean, "running_var": variance, "num_batches_tracked": None})
            momentum, norm.momentum = norm.momentum, 1.0
            try:
                output = forward(*args, **kwargs)
            finally:
                norm.momentum = momentum
                _swap(norm, before)
            self._note(norm, _Statistics(output.numel() // len(mean), mean, variance))
            return output

        return run

    def _note(self, norm: _BatchNorm, found: _Statistics) -> None:
        """Keep what one forward found, by its place among the calls of this norm in one micro-batch."""
        key = current_key()
        number = 0
        if key is not None:  # without a key, every call is taken for a micro-batch of its own
            number = self._num_calls.get((norm, key.base), 0)
            self._num_calls[norm, key.base] = number + 1
        calls = self._found[norm]
        if number == len(calls):
            calls.append([])
        calls[number].append(found)


def _sums(norm: _BatchNorm, call: list[_Statistics]) -> torch.Tensor:
    """Count, sum and sum of squares of all values, measured from the running mean: these add up over replicas."""
    shift = _buffer(norm, "running_mean").double()
    total = torch.zeros(1 + 2 * len(shift), dtype=torch.float64, device=shift.device)
    if call:
        counts = torch.tensor([one.count for one in call], dtype=torch.float64, device=shift.device)[:, None]
        means = torch.stack([one.mean for one in call]).double() - shift
        squares = torch.stack([one.variance for one in call]).double() * (counts - 1) + counts * means.square()
        total[0] = counts.sum()
        total[1:] = torch.cat([(counts * means).sum(0), squares.sum(0)])
    return total


def _move(norm: _BatchNorm, shift: torch.Tensor, sums: torch.Tensor) -> None:
    """One update of the running statistics, as the module itself does it with a whole batch."""
    count = float(sums[0])
    if count < 2:
        return
    mean, square = sums[1:].chunk(2)
    mean = mean / count
    variance = (square - count * mean.square()).clamp_min(0) / (count - 1)
    factor = norm.momentum
    if norm._buffers.get("num_batches_tracked") is not None:
        tracked = _buffer(norm, "num_batches_tracked")
        tracked.add_(1)
        factor = 1.0 / float(tracked) if factor is None else factor
    for name, value in (("running_mean", mean + shift), ("running_var", variance)):
        running = _buffer(norm, name)
        running.copy_((1 - (factor or 0.0)) * running.double() + (factor or 0.0) * value)


def _buffer(norm: _BatchNorm, name: str) -> torch.Tensor:
    buffer = norm._buffers[name]
    assert buffer is not None
    return buffer


def _blank(buffer: torch.Tensor | None) -> torch.Tensor | None:
    return None if buffer is None else torch.zeros_like(buffer)


def _swap(norm: _BatchNorm, buffers: dict[str, Any]) -> dict[str, Any]:
    """Put other tensors in the place of a norm's buffers; returns those that were there."""
    before = {name: norm._buffers.get(name) for name in buffers}
    norm._buffers.update(buffers)
    return before
