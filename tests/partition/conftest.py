"""Profiles made by hand, so that every number in a test can be checked with a pencil."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from stagewright.profiler.profile import Amount, Profile, Time, UnitProfile


def _time(seconds: float) -> Time:
    return Time(median_s=float(seconds), spread_s=0.0)


def _amount(value: int | Amount) -> Amount:
    return value if isinstance(value, Amount) else Amount(total=value)


@pytest.fixture(scope="session")
def make_profile() -> Callable[..., Profile]:
    """Build a profile from one list a column; every column but the forward times may be left out."""

    def make(
        forward: Sequence[float],
        *,
        backward: Sequence[float] | None = None,
        parameters: Sequence[int | Amount] | None = None,
        macs: Sequence[int] | None = None,
        crossing: Sequence[int] | None = None,
        kept: Sequence[int | Amount] | None = None,
        inputs: Sequence[int] | None = None,
        buffers: Sequence[int] | None = None,
        blocks: Sequence[str | None] | None = None,
        names: Sequence[str] | None = None,
        training: bool | None = None,
    ) -> Profile:
        num_units = len(forward)
        nothing = [0] * num_units
        sizes = [_amount(value) for value in parameters or nothing]
        units = tuple(
            UnitProfile(
                name=names[index] if names else f"unit{index}",
                kind="Unit",
                block=blocks[index] if blocks else None,
                parameters=sizes[index],
                # Four bytes a parameter.
                parameter_bytes=Amount(
                    total=4 * sizes[index].total,
                    shares=tuple((other, 4 * amount) for other, amount in sizes[index].shares),
                ),
                buffer_bytes=(buffers or nothing)[index],
                macs=(macs or nothing)[index],
                forward=_time(forward[index]),
                # How the backward pass is divided makes no difference to a split.
                backward_input=_time((backward or nothing)[index] * 0.25),
                backward_weight=_time((backward or nothing)[index] * 0.75),
                output_bytes=(crossing or nothing)[index],
                saved_bytes=_amount((kept or nothing)[index]),
                recompute_saved_bytes=(inputs or nothing)[index],
                crossing_bytes=0 if index == num_units - 1 else (crossing or nothing)[index],
            )
            for index in range(num_units)
        )
        return Profile(
            model="handmade",
            device="cpu:0",
            dtype="float32",
            batch_size=2,
            training=backward is not None if training is None else training,
            units=units,
            whole_forward=_time(sum(forward)),
            whole_backward=_time(sum(backward or nothing)),
            whole_macs=sum(macs or nothing),
            versions={},
        )

    return make
