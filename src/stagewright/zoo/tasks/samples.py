"""The common part of all data sets: samples that become batches on request."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagewright.errors import UsageError
from stagewright.zoo.model import Batch


class Samples(abc.ABC):
    """One split of a data set in the format of a model; `samples[3]` is a batch of one sample."""

    labels: NDArray[Any]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.batch([index % len(self)])

    @abc.abstractmethod
    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the samples at `indices` as one batch."""

    def stream(self, batches: Sequence[Sequence[int]]) -> Iterator[Batch]:
        """Yield the batches with these indices, one after another."""
        return map(self.batch, batches)

    def batches(self, batch_size: int, *, shuffle_seed: int | None = None, drop_last: bool = False) -> Iterator[Batch]:
        """Yield every sample once, in order or shuffled by a seed; the last batch may be smaller."""
        if batch_size < 1:
            raise UsageError(f"a batch must have at least 1 sample, not {batch_size}")
        order = np.arange(len(self))
        if shuffle_seed is not None:
            np.random.default_rng(shuffle_seed).shuffle(order)
        stop = len(self) - len(self) % batch_size if drop_last else len(self)
        for start in range(0, stop, batch_size):
            yield self.batch(order[start : min(start + batch_size, stop)].tolist())
