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

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from stagewright.engine.batch.dropout import current_key
from stagewright.errors import UsageError

__all__ = ["DeferredBatchNorm", "held_statistics", "refuse_synchronised", "refuse_torn_norms", "tracked_norms"]

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_held: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def tracked_norms(module: nn.Module) -> list[_BatchNorm]:
    """The batch norms in a module that have running statistics, each once."""
    return [
        one
        for one in module.modules()
        if isinstance(one, _BatchNorm) and one.track_running_stats and one.running_mean is not None
    ]


def refuse_torn_norms(model: nn.Module, stages: Sequence[nn.Module], workers: Sequence[int], *, deferred: bool) -> None:
    """Refuse a batch norm that several stages call, where its running statistics would not move as in serial.

    Workers would move copies of their own, and stages of one worker would move them in another order, which matters
    unless all moves are one.
    """
    for name, norm in model.named_modules():
        if not isinstance(norm, _BatchNorm) or norm.running_mean is None or not norm.training:
            continue
        held = [at for at, stage in enumerate(stages) if any(one is norm for one in stage.modules())]
        if len(held) > 1 and not (deferred and len({workers[at] for at in held}) == 1):
            raise UsageError(
                f"the batch norm {name!r} is called in stages {' and '.join(map(str, held))}, which would not move its "
                "running statistics as serial does: cut so that one stage has all its calls, or use data"
            )


def refuse_synchronised(model: nn.Module, num_workers: int) -> None:
    """Refuse norms that sum over all workers by themselves: worker 0, alone with serial, would wait for others."""
    for name, norm in model.named_modules():
        if isinstance(norm, nn.SyncBatchNorm) and norm.training and num_workers > 1:
            raise UsageError(
                f"{name!r} is a SyncBatchNorm, which {num_workers} workers compute together and serial can't alone: "
                'make it a BatchNorm; batch_norm = "deferred" gives it the statistics of the whole batch'
            )


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
    def finish_step(self, reduce: Callable[[torch.Tensor], object] | None = None, *, is_counted: bool = True) -> None:
        """Move the running statistics once, with those of the whole batch.

        ``reduce`` adds a float64 vector over the replicas of the data axis, in place; every replica must call it with
        the same model and the same running statistics. It is called once for all norms of a device. A replica that
        has no samples of its own, and ran others' for company, is not counted.
        """
        num_calls = max((len(calls) for calls in self._found.values()), default=0)
        # A second call of a norm moves what the first has moved; all first calls go together, all second ones, …
        rounds = [
            _Round({norm: calls[number] for norm, calls in self._found.items() if number < len(calls)})
            for number in range(num_calls)
        ]
        if reduce is not None and rounds:
            flat = torch.cat([one.sums.flatten() for one in rounds])
            if not is_counted:
                flat.zero_()
            reduce(flat)
            for one, part in zip(rounds, torch.split(flat, [one.sums.numel() for one in rounds]), strict=True):
                one.sums = part.view(3, -1)
        for one in rounds:
            one.move()
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


class _Round:
    """One move of many norms, all their channels side by side."""

    def __init__(self, found: dict[_BatchNorm, list[_Statistics]]) -> None:
        self.norms = list(found)
        self.sizes = [len(_buffer(norm, "running_mean")) for norm in self.norms]
        self.shift = self._running("running_mean")
        self.sums = self._add(list(itertools.zip_longest(*found.values())))
        """Count, sum and sum of squares of each channel, measured from its running mean; they add up over replicas."""

    def _add(self, rows: list[tuple[_Statistics | None, ...]]) -> torch.Tensor:
        """Add up what the norms found in each micro-batch, a row each; ``None`` where one found nothing."""
        if not rows:
            return self.shift.new_zeros(3, len(self.shift))
        blank = [torch.zeros_like(_buffer(norm, "running_mean")) for norm in self.norms]
        nothing = [_Statistics(0, zeros, zeros) for zeros in blank]
        every = [one or none for row in rows for one, none in zip(row, nothing, strict=True)]
        shape = (len(rows), len(self.shift))
        count = self._spread([one.count for one in every]).view(shape)
        mean = torch.cat([one.mean for one in every]).double().view(shape) - self.shift
        variance = torch.cat([one.variance for one in every]).double().view(shape)
        square = (count - 1).clamp_min(0) * variance + count * mean.square()
        return torch.stack([count.sum(0), (count * mean).sum(0), square.sum(0)])

    def move(self) -> None:
        """Update the running statistics as the modules do it themselves with a whole batch."""
        count, total, square = self.sums
        seen = count > 1
        mean = total / count.clamp_min(1)
        variance = (square - count * mean.square()).clamp_min(0) / (count - 1).clamp_min(1)
        firsts = [sum(self.sizes[:at]) for at in range(len(self.sizes))]
        factor = self._spread(
            [_factor(norm) if moves else 0.0 for norm, moves in zip(self.norms, seen[firsts].tolist(), strict=True)]
        )
        for name, value in (("running_mean", mean + self.shift), ("running_var", variance)):
            running = self._running(name)
            # Not `lerp`: with a factor of 0 the running value must stay, to the last bit.
            moved = torch.where(factor > 0, (1 - factor) * running + factor * value, running)
            for norm, part in zip(self.norms, torch.split(moved, self.sizes), strict=True):
                _buffer(norm, name).copy_(part)

    def _running(self, name: str) -> torch.Tensor:
        return torch.cat([_buffer(norm, name) for norm in self.norms]).to(torch.float64)

    def _spread(self, values: Sequence[float]) -> torch.Tensor:
        """One number for each norm (or for each norm in every row) as one for each channel."""
        sizes = torch.tensor(self.sizes * (len(values) // len(self.sizes)))
        return torch.tensor(values, dtype=torch.float64).repeat_interleave(sizes).to(self.shift.device)


def _factor(norm: _BatchNorm) -> float:
    """Count one batch more; how far the running statistics move towards it."""
    tracked = norm._buffers.get("num_batches_tracked")
    if tracked is not None:
        tracked.add_(1)
        if norm.momentum is None:
            return 1.0 / float(tracked)
    return norm.momentum or 0.0


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
