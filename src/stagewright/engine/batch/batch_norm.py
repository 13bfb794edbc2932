"""Batch norm under micro-batching: which statistics update the running statistics, and when.

In both modes a micro-batch is normalized with its own mean and variance: no stage ever sees the whole batch. So the
loss of a model with batch norm depends on the micro-batch size, as it depends on the batch size on a single device;
compare with a single-device baseline on the same micro-batches. The modes differ in the running statistics only:

    plain       updated once per micro-batch, m times per step, in the order in which micro-batches run
    deferred    updated once per step, with mean and variance of the whole batch (of all replicas on request):
                what one single-device step on the whole batch does to a first layer

A recomputed forward updates nothing in either mode (``freeze_statistics``). In deferred mode the module computes its
statistics as usual, but into fresh tensors with momentum 1, without a second pass over the data; counts, means and
variances are merged in float64 at the end of the step (Chan, Golub, LeVeque 1983, around the running mean). Names and
tensors of ``state_dict`` stay the module's. ``SyncBatchNorm`` merges by itself and is left unchanged.
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

from stagewright.engine.batch.random_key import current_key
from stagewright.errors import UsageError
from stagewright.graph.compilation import keep_eager

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_frozen: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def find_tracked_norms(module: nn.Module) -> list[_BatchNorm]:
    """Return the batch norms in a module that have running statistics, each once."""
    return [
        norm
        for norm in module.modules()
        if isinstance(norm, _BatchNorm) and norm.track_running_stats and norm.running_mean is not None
    ]


def check_split_norms(model: nn.Module, stages: Sequence[nn.Module], workers: Sequence[int], *, deferred: bool) -> None:
    """Raise UsageError for a batch norm that several stages call, if its running statistics would differ.

    Several workers would each update their own copy, and stages of one worker would update it in another order, which
    matters unless there is one update per step.
    """
    for name, norm in model.named_modules():
        if not isinstance(norm, _BatchNorm) or norm.running_mean is None or not norm.training:
            continue
        callers = [index for index, stage in enumerate(stages) if any(module is norm for module in stage.modules())]
        if len(callers) > 1 and not (deferred and len({workers[index] for index in callers}) == 1):
            raise UsageError(
                f"the batch norm {name!r} is called in stages {' and '.join(map(str, callers))}, which would not "
                "update its running statistics as a single device does: cut so that one stage has all its calls, or "
                "use data parallelism"
            )


def reject_sync_batch_norm(model: nn.Module, num_workers: int) -> None:
    """Raise UsageError for SyncBatchNorm: the baseline, which worker 0 computes alone, would wait for the others."""
    for name, norm in model.named_modules():
        if isinstance(norm, nn.SyncBatchNorm) and norm.training and num_workers > 1:
            raise UsageError(
                f"{name!r} is a SyncBatchNorm, which {num_workers} workers compute together and a single device can't: "
                'make it a BatchNorm; batch_norm = "deferred" gives it the statistics of the whole batch'
            )


@contextmanager
def freeze_statistics(norms: Iterable[_BatchNorm]) -> Iterator[None]:
    """Leave running statistics unchanged by forwards in this block, which are recomputations.

    In training nothing reads the running statistics, so temporary buffers can take what is written.
    """
    swapped: list[tuple[_BatchNorm, dict[str, Any]]] = []
    try:
        for norm in norms:
            if norm.training and norm not in _frozen:
                buffers = {name: norm._buffers[name] for name in _BUFFERS}
                blank = {name: None if value is None else torch.zeros_like(value) for name, value in buffers.items()}
                swapped.append((norm, _swap(norm, blank)))
                _frozen.add(norm)
        yield
    finally:
        for norm, before in swapped:
            _frozen.discard(norm)
            _swap(norm, before)


@dataclass(slots=True)
class _Statistics:
    """The batch statistics of one forward in training mode."""

    count: int
    """Values per channel."""
    mean: torch.Tensor
    variance: torch.Tensor
    """Unbiased: divided by ``count - 1``."""


class DeferredBatchNorm:
    """Deferred mode for every batch norm in some modules, from ``install`` to ``remove`` (or as a context manager)."""

    def __init__(self, *modules: nn.Module) -> None:
        unique = {norm: None for module in modules for norm in find_tracked_norms(module)}
        self.norms: tuple[_BatchNorm, ...] = tuple(norm for norm in unique if not isinstance(norm, nn.SyncBatchNorm))
        # For each norm and each of its calls in a forward of the model: the statistics of every micro-batch.
        self._collected: dict[_BatchNorm, list[list[_Statistics]]] = {norm: [[]] for norm in self.norms}
        self._num_calls: dict[tuple[_BatchNorm, int | None], int] = {}
        self._original_forwards: dict[_BatchNorm, Any] = {}

    def __enter__(self) -> DeferredBatchNorm:
        self.install()
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def install(self, *, compiled: bool = False) -> None:
        """Make forwards in training mode collect their statistics; in compiled units they stay eager."""
        for norm in self.norms:
            if norm not in self._original_forwards:
                self._original_forwards[norm] = norm.__dict__.get("forward")
                forward = self._make_forward(norm, norm.forward)
                norm.__dict__["forward"] = keep_eager(forward) if compiled else forward

    def remove(self) -> None:
        """Restore the modules; drop the statistics of an unfinished step."""
        for norm, original in self._original_forwards.items():
            if original is None:
                del norm.__dict__["forward"]
            else:
                norm.__dict__["forward"] = original
        self._original_forwards.clear()
        self.discard()

    def discard(self) -> None:
        """Drop the collected statistics, as after a failed step."""
        self._num_calls.clear()
        for calls in self._collected.values():
            for call in calls:
                call.clear()

    @torch.no_grad()
    def finish_step(self, reduce: Callable[[torch.Tensor], object] | None = None, *, is_counted: bool = True) -> None:
        """Update the running statistics once, with those of the whole batch.

        ``reduce`` all-reduces a float64 vector over the replicas in place; every replica must call it with the same
        model and the same running statistics. It is called once for all norms. A replica without samples, which ran
        those of another only to take part, is not counted.
        """
        num_calls = max((len(calls) for calls in self._collected.values()), default=0)
        # A second call of a norm updates what the first has updated: all first calls go together, all second ones, …
        updates = [
            _Update({norm: calls[number] for norm, calls in self._collected.items() if number < len(calls)})
            for number in range(num_calls)
        ]
        if reduce is not None and updates:
            flat = torch.cat([update.sums.flatten() for update in updates])
            if not is_counted:
                flat.zero_()
            reduce(flat)
            sizes = [update.sums.numel() for update in updates]
            for update, sums in zip(updates, torch.split(flat, sizes), strict=True):
                update.sums = sums.view(3, -1)
        for update in updates:
            update.apply()
        self.discard()

    def _make_forward(self, norm: _BatchNorm, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            if not norm.training or norm in _frozen:
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
            self._collect(norm, _Statistics(output.numel() // len(mean), mean, variance))
            return output

        return run

    def _collect(self, norm: _BatchNorm, statistics: _Statistics) -> None:
        """Keep the statistics of one forward, by its position among the calls of this norm in one micro-batch."""
        key = current_key()
        number = 0
        if key is not None:  # without a key, every call counts as a separate micro-batch
            number = self._num_calls.get((norm, key.base), 0)
            self._num_calls[norm, key.base] = number + 1
        calls = self._collected[norm]
        if number == len(calls):
            calls.append([])
        calls[number].append(statistics)


class _Update:
    """One update of many norms, all their channels concatenated."""

    def __init__(self, statistics: dict[_BatchNorm, list[_Statistics]]) -> None:
        self.norms = list(statistics)
        self.sizes = [len(_buffer(norm, "running_mean")) for norm in self.norms]
        self.shift = self._running("running_mean")
        self.sums = self._sum(list(itertools.zip_longest(*statistics.values())))
        """Count, sum and sum of squares of each channel around its running mean; additive over replicas."""

    def _sum(self, rows: list[tuple[_Statistics | None, ...]]) -> torch.Tensor:
        """Sum the statistics of all micro-batches, one row each; ``None`` for a norm that did not run."""
        if not rows:
            return self.shift.new_zeros(3, len(self.shift))
        zeros = [torch.zeros_like(_buffer(norm, "running_mean")) for norm in self.norms]
        empty = [_Statistics(0, zero, zero) for zero in zeros]
        statistics = [entry or default for row in rows for entry, default in zip(row, empty, strict=True)]
        shape = (len(rows), len(self.shift))
        count = self._expand([entry.count for entry in statistics]).view(shape)
        mean = torch.cat([entry.mean for entry in statistics]).double().view(shape) - self.shift
        variance = torch.cat([entry.variance for entry in statistics]).double().view(shape)
        square = (count - 1).clamp_min(0) * variance + count * mean.square()
        return torch.stack([count.sum(0), (count * mean).sum(0), square.sum(0)])

    def apply(self) -> None:
        """Update the running statistics as the modules themselves do with a whole batch."""
        count, total, square = self.sums
        has_samples = count > 1
        mean = total / count.clamp_min(1)
        variance = (square - count * mean.square()).clamp_min(0) / (count - 1).clamp_min(1)
        starts = [sum(self.sizes[:index]) for index in range(len(self.sizes))]
        flags = has_samples[starts].tolist()
        factor = self._expand(
            [_count_batch(norm) if flag else 0.0 for norm, flag in zip(self.norms, flags, strict=True)]
        )
        for name, value in (("running_mean", mean + self.shift), ("running_var", variance)):
            running = self._running(name)
            # Not `lerp`: with a factor of 0 the running value must stay, to the last bit.
            updated = torch.where(factor > 0, (1 - factor) * running + factor * value, running)
            for norm, channels in zip(self.norms, torch.split(updated, self.sizes), strict=True):
                _buffer(norm, name).copy_(channels)

    def _running(self, name: str) -> torch.Tensor:
        return torch.cat([_buffer(norm, name) for norm in self.norms]).to(torch.float64)

    def _expand(self, values: Sequence[float]) -> torch.Tensor:
        """Repeat one number per norm (or per norm and row) for each channel."""
        sizes = torch.tensor(self.sizes * (len(values) // len(self.sizes)))
        return torch.tensor(values, dtype=torch.float64).repeat_interleave(sizes).to(self.shift.device)


def _count_batch(norm: _BatchNorm) -> float:
    """Count one more batch; return its weight in the running statistics."""
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


def _swap(norm: _BatchNorm, buffers: dict[str, Any]) -> dict[str, Any]:
    """Replace a norm's buffers; return the previous ones."""
    before = {name: norm._buffers.get(name) for name in buffers}
    norm._buffers.update(buffers)
    return before
