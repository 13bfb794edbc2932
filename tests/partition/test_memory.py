from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from stagewright.partition.conditions import Conditions
from stagewright.partition.memory import StageMemory, amount_table
from stagewright.profiler.profile import Amount, Profile, amount_of

MakeProfile = Callable[..., Profile]


@pytest.fixture(scope="module")
def profile(make_profile: MakeProfile) -> Profile:
    return make_profile(
        [1, 1, 1],
        backward=[1, 1, 1],
        parameters=[10, 20, Amount(total=10, shares=((0, 10),))],
        crossing=[100, 200, 0],
        saved=[1000, Amount(total=2000, shares=((0, 500),)), 4000],
        inputs=[7, 70, 700],
        buffers=[1, 2, 3],
    )


@pytest.mark.parametrize(
    ("conditions", "training", "first", "last", "in_flight", "expected"),
    [
        # 4 bytes × (weights, gradient, 2 Adam states) × parameters + buffers + saved × in flight + received both ways
        (Conditions(), True, 0, 0, 2, 16 * 10 + 1 + 1000 * 2 + 0 + 100),
        (Conditions(), True, 1, 1, 3, 16 * 20 + 2 + 2000 * 3 + 100 + 200),
        # The tied weight and the shared activation are counted once.
        (Conditions(), True, 0, 2, 1, 16 * 30 + 6 + 6500),
        (Conditions(), True, 1, 2, 1, 16 * 30 + 5 + 6000 + 100),
        (Conditions(optimizer_states=0), True, 0, 0, 1, 8 * 10 + 1 + 1000 + 100),
        # Recompute: inputs × in flight + what the largest unit saves.
        (Conditions(recompute=True), True, 0, 1, 4, 16 * 30 + 3 + 77 * 4 + 2000 + 200),
        # Inference: parameters, buffers, the largest input and output of a unit, and the next one's input.
        (Conditions(), False, 0, 0, 4, 4 * 10 + 1 + 100 + 0),
        (Conditions(), False, 1, 2, 4, 4 * 30 + 5 + 300 + 100),
    ],
)
def test_memory_of_a_stage(
    profile: Profile, conditions: Conditions, training: bool, first: int, last: int, in_flight: int, expected: int
) -> None:
    assert StageMemory(profile, conditions, training=training).of(first, last, in_flight) == expected


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
def test_tables_agree_with_single_stages(profile: Profile, training: bool, recompute: bool) -> None:
    memory = StageMemory(profile, Conditions(recompute=recompute), training=training)
    fixed, per_microbatch = memory.tables
    for first in range(3):
        for last in range(first, 3):
            assert fixed[first, last] + 5 * per_microbatch[first, last] == memory.of(first, last, 5)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_amount_table_agrees_with_ranges(data: st.DataObject) -> None:
    num_units = data.draw(st.integers(1, 6))
    amounts = [
        Amount(
            total=data.draw(st.integers(0, 99)),
            shares=tuple(data.draw(st.dictionaries(st.integers(0, index - 1), st.integers(0, 9))).items())
            if index
            else (),
        )
        for index in range(num_units)
    ]
    table = amount_table(amounts)
    for first in range(num_units):
        for last in range(first, num_units):
            assert table[first, last] == amount_of(amounts, first, last)


def test_least_excess_names_the_worst_stage(make_profile: MakeProfile) -> None:
    memory = StageMemory(make_profile([1, 1, 1], parameters=[10, 50, 10]), Conditions(), training=False)
    # 240 | 40 or 40 | 240 bytes: the second stage may hold 100 more, so the latter is 40 over, the former 140.
    assert memory.least_excess([100, 200], [1, 1]) == (40, 1)


def test_shared_parameters_on_one_device(profile: Profile) -> None:
    memory = StageMemory(profile, Conditions(), training=False)
    assert memory.shared_bytes(2, 2, 0, 0) == 40
    assert memory.shared_bytes(1, 1, 0, 0) == 0


def test_fits_agrees_with_every_range(profile: Profile) -> None:
    memory = StageMemory(profile, Conditions(), training=True)
    allowed = memory.fits([3000, 6500], [2, 1])
    for stage, (limit, in_flight) in enumerate(((3000, 2), (6500, 1))):
        for width in (1, 3, 2):
            fits = allowed(stage, np.array([1, 2, 3]), width)
            assert fits.shape == (3, width)
            for row, end in enumerate((1, 2, 3)):
                for column in range(width):
                    first = end - width + column
                    if first >= 0:
                        assert fits[row, column] == (memory.of(first, end - 1, in_flight) <= limit)
