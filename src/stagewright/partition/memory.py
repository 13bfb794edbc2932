"""The memory of a stage.

    training    parameters × (weights + gradients + optimizer states) + buffers
                + saved activations × micro-batches in flight
                + one received activation + one received gradient
    recompute   instead of all saved activations: every unit's inputs × micro-batches in flight
                + the saved activations of the one unit that is being recomputed
    inference   parameters + buffers + the largest input and output of one unit + one received activation

Under 1F1B, stage i of p holds min(m, p - i) micro-batches in flight, under GPipe all m. Shared parameters and tensors
that several units save are counted once per stage. Workspace of operators and fragmentation of the allocator are not
modeled; leave room for them in the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stagewright.partition.conditions import Conditions
from stagewright.profiler.profile import Amount, Profile, amount_of

Integers: TypeAlias = npt.NDArray[np.int64]


class StageMemory:
    """The memory of any range of units as a stage, for one range or for all at once."""

    def __init__(self, profile: Profile, conditions: Conditions, *, training: bool) -> None:
        units = profile.units
        self._training = training
        self._recompute = training and conditions.recompute
        self._copies = 2 + conditions.optimizer_states if training else 1
        self._parameters = [unit.parameter_bytes for unit in units]
        self._saved = [unit.saved_bytes for unit in units]
        self._buffers = np.array([unit.buffer_bytes for unit in units], dtype=np.int64)
        self._inputs = np.array([unit.recompute_saved_bytes for unit in units], dtype=np.int64)
        # crossings[boundary]: 0 before the first unit and after the last.
        self._crossings = np.array([0, *(unit.crossing_bytes for unit in units[:-1]), 0], dtype=np.int64)
        outputs = np.array([max(unit.output_bytes, unit.crossing_bytes) for unit in units], dtype=np.int64)
        if training:
            self._working = np.array([unit.saved_bytes.total for unit in units], dtype=np.int64)
        else:
            self._working = self._crossings[:-1] + outputs

    def of(self, first: int, last: int, in_flight: int) -> int:
        """Return the bytes that the units first … last need as one stage."""
        units = slice(first, last + 1)
        fixed = self._copies * amount_of(self._parameters, first, last) + int(self._buffers[units].sum())
        fixed += int(self._crossings[first])
        if not self._training:
            return fixed + int(self._working[units].max())
        fixed += int(self._crossings[last + 1])
        if self._recompute:
            return fixed + int(self._working[units].max()) + in_flight * int(self._inputs[units].sum())
        return fixed + in_flight * amount_of(self._saved, first, last)

    def shared_bytes(self, first: int, last: int, earlier_first: int, earlier_last: int) -> int:
        """Return the parameter memory that a stage shares with an earlier stage on the same device."""
        shares = [share for amount in self._parameters[first : last + 1] for share in amount.shares]
        return self._copies * sum(amount for index, amount in shares if earlier_first <= index <= earlier_last)

    @cached_property
    def tables(self) -> tuple[Integers, Integers]:
        """(fixed bytes, bytes per micro-batch in flight), each [first unit, last unit]; valid for first <= last."""
        fixed = self._copies * amount_table(self._parameters) + _sums(self._buffers)
        fixed += self._crossings[:-1, None]
        if not self._training:
            return fixed + _largest(self._working), np.zeros_like(fixed)
        fixed += self._crossings[None, 1:]
        if self._recompute:
            return fixed + _largest(self._working), _sums(self._inputs)
        return fixed, amount_table(self._saved)

    def fits(
        self, limits: Sequence[int], in_flight: Sequence[int]
    ) -> Callable[[int, Integers, int], npt.NDArray[np.bool_]]:
        """Return a function that says which ranges fit on which stage (see `chain.Allowed`)."""
        fixed, per_microbatch = self.tables
        # Both tables as [last unit, column], the layout of the search, as wide as needed so far.
        bands: list[Integers] = [fixed[:, :0], per_microbatch[:, :0]]

        def allowed(stage: int, ends: Integers, width: int) -> npt.NDArray[np.bool_]:
            if bands[0].shape[1] < width:
                lasts = np.arange(len(fixed))[:, None]
                firsts = np.maximum(lasts + 1 - width + np.arange(width), 0)
                bands[:] = fixed[firsts, lasts], per_microbatch[firsts, lasts]
            # The ends are consecutive, and the nearest starts are the last columns.
            window = slice(ends[0] - 1, ends[-1]), slice(bands[0].shape[1] - width, None)
            return bands[0][window] + in_flight[stage] * bands[1][window] <= limits[stage]

        return allowed

    def least_excess(self, limits: Sequence[int], in_flight: Sequence[int]) -> tuple[int, int]:
        """Return (bytes above its limit, stage) of the worst stage in the split that minimizes this excess."""
        fixed, per_microbatch = self.tables
        num_units, num_stages = len(fixed), len(limits)
        infinite = np.iinfo(np.int64).max
        outside = np.tri(num_units, k=-1, dtype=np.bool_)
        excess: Integers = np.full(num_units + 1, infinite)
        excess[0] = np.iinfo(np.int64).min
        worst = np.zeros(num_units + 1, dtype=np.int64)
        for stage in range(num_stages):
            need = fixed + in_flight[stage] * per_microbatch - limits[stage]
            need[outside] = infinite
            reached = np.maximum(excess[:-1, None], need)
            choice = reached.argmin(axis=0)
            columns = np.arange(num_units)
            blame = np.where(need[choice, columns] >= excess[choice], stage, worst[choice])
            excess = np.concatenate([[infinite], reached[choice, columns]])
            worst = np.concatenate([[0], blame])
        return int(excess[-1]), int(worst[-1])


def amount_table(amounts: Sequence[Amount]) -> Integers:
    """Return the table [first, last] of the amounts of those units, shared amounts counted once."""
    shared = np.zeros((len(amounts), len(amounts)), dtype=np.int64)
    for index, amount in enumerate(amounts):
        for earlier, size in amount.shares:
            shared[earlier, index] += size
    duplicates = np.cumsum(np.cumsum(shared[::-1], axis=0)[::-1], axis=1)
    table: Integers = _sums(np.array([amount.total for amount in amounts], dtype=np.int64)) - duplicates
    return table


def _sums(values: Integers) -> Integers:
    """Return the table [first, last] of the sums of those values."""
    cumulative = np.concatenate([[0], np.cumsum(values)])
    table: Integers = cumulative[None, 1:] - cumulative[:-1, None]
    return table


def _largest(values: Integers) -> Integers:
    """Return the table [first, last] of the largest of those values."""
    table: Integers = np.maximum.accumulate(np.triu(np.broadcast_to(values, (len(values), len(values)))), axis=1)
    return table
