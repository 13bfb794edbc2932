"""Small handmade profiles, so that every number in a test can be checked by hand."""

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
    """Build a profile from one list per column; only the forward times are required."""

    def make(
        forward: Sequence[float],
        *,
        backward: Sequence[float] | None = None,
        parameters: Sequence[int | Amount] | None = None,
        macs: Sequence[int] | None = None,
        crossing: Sequence[int] | None = None,
        saved: Sequence[int | Amount] | None = None,
        inputs: Sequence[int] | None = None,
        buffers: Sequence[int] | None = None,
        blocks: Sequence[str | None] | None = None,
        names: Sequence[str] | None = None,
        training: bool | None = None,
    ) -> Profile:
        num_units = len(forward)
        zeros = [0] * num_units
        sizes = [_amount(value) for value in parameters or zeros]
        units = tuple(
            UnitProfile(
                name=names[index] if names else f"unit{index}",
                kind="Unit",
                block=blocks[index] if blocks else None,
                parameters=sizes[index],
                # Four bytes per parameter.
                parameter_bytes=Amount(
                    total=4 * sizes[index].total,
                    shares=tuple((earlier, 4 * amount) for earlier, amount in sizes[index].shares),
                ),
                buffer_bytes=(buffers or zeros)[index],
                macs=(macs or zeros)[index],
                forward=_time(forward[index]),
                # A split depends only on the sum of both.
                backward_input=_time((backward or zeros)[index] * 0.25),
                backward_weight=_time((backward or zeros)[index] * 0.75),
                output_bytes=(crossing or zeros)[index],
                saved_bytes=_amount((saved or zeros)[index]),
                recompute_saved_bytes=(inputs or zeros)[index],
                crossing_bytes=0 if index == num_units - 1 else (crossing or zeros)[index],
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
            whole_backward=_time(sum(backward or zeros)),
            whole_macs=sum(macs or zeros),
            versions={},
        )

    return make
