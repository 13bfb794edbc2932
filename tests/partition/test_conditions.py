from __future__ import annotations

from typing import Any

import pytest

from stagewright.errors import UsageError
from stagewright.partition import Conditions


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"speeds": (1, 0)}, "device speed of 0"),
        ({"speeds": (float("nan"),)}, "device speed of nan"),
        ({"bandwidth_bytes_per_s": 0}, "bandwidth of 0"),
        ({"latency_s": -1}, "latency of -1"),
        ({"memory_limit_bytes": 0}, "memory limit of 0"),
        ({"memory_limit_bytes": (5, -5)}, "memory limit of -5"),
        ({"schedule": "zigzag"}, "unknown schedule 'zigzag': use '1f1b' or 'gpipe'"),
        ({"optimizer_states": -1}, "optimizer_states is -1"),
        ({"schedule": "gpipe", "num_microbatches": None}, "give num_microbatches"),
    ],
)
def test_impossible_conditions_are_rejected(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Conditions(**wrong)


def test_devices_are_counted() -> None:
    with pytest.raises(UsageError, match="3 speeds were given for 2 devices: give 2 values"):
        Conditions(speeds=(1, 1, 1)).check_devices(2)
    with pytest.raises(UsageError, match="1 memory limits were given for 2 devices"):
        Conditions(memory_limit_bytes=(9,)).check_devices(2)
    Conditions(speeds=(1, 1, 1), memory_limit_bytes=9).check_devices(2, exactly=False)


def test_micro_batches_in_flight() -> None:
    assert [Conditions(num_microbatches=3).in_flight(stage, 4) for stage in range(4)] == [3, 3, 2, 1]
    assert [Conditions(num_microbatches=None).in_flight(stage, 4) for stage in range(4)] == [4, 3, 2, 1]
    assert Conditions(schedule="gpipe", num_microbatches=7).in_flight(3, 4) == 7


def test_link_time_in_both_directions() -> None:
    conditions = Conditions(bandwidth_bytes_per_s=100, latency_s=1)
    assert conditions.link_s(50, training=False) == 1.5
    assert conditions.link_s(50, training=True) == 3.0
    assert Conditions().link_s(50, training=True) == 0.0
