"""A run that is not plausible is repeated, and what counts in the end is decided by rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from stagewright.runs.result import RunResult
from stagewright.studies.framework.repeats import Expectation, measure
from stagewright.studies.framework.rounds import disturbances, speedups_by_round


def runs_of(rates: Sequence[float], spreads: Sequence[float] = ()) -> Callable[[], RunResult]:
    """A function that returns one result after the other, each with half of its interquartile range."""
    spread_of = [*spreads, *[0.0] * len(rates)]
    rows = [
        RunResult(
            equal=True, samples_per_s=rate, samples_per_s_spread=2 * rate * spread_of[number], run=f"runs/{number}"
        )
        for number, rate in enumerate(rates)
    ]
    return iter(rows).__next__


def test_a_plausible_run_is_run_once() -> None:
    measured = measure(runs_of([20.0]), Expectation(num_devices=2, baseline_rate=11.0, forecast_rate=18.0))
    assert (measured.run.samples_per_s, measured.left_out, measured.reason) == (20.0, (), "")


@pytest.mark.parametrize(
    ("rates", "spreads", "expected", "counts", "reason"),
    [
        ([20.0, 21.0], [0.3, 0.1], Expectation(), 21.0, "its steps varied by ±30 %"),
        ([20.0, 21.0], [0.3, 0.4], Expectation(), 20.0, "its steps varied by ±30 %"),
        ([6.6, 82.8, 80.0], [], Expectation(forecast_rate=75.0), 80.0, "6.6 samples/s, where 75.0 were forecast"),
        ([20.0, 21.0], [], Expectation(forecast_rate=75.0), 21.0, "20.0 samples/s, where 75.0 were forecast"),
        ([200.0, 100.0, 20.0], [], Expectation(forecast_rate=20.0), 100.0, "200.0 samples/s, where 20.0 were forecast"),
    ],
)
def test_which_of_several_runs_counts(
    rates: list[float], spreads: list[float], expected: Expectation, counts: float, reason: str
) -> None:
    measured = measure(runs_of(rates, spreads), expected)
    assert (measured.run.samples_per_s, measured.rates, measured.reason) == (counts, tuple(rates), reason)
    assert sorted([measured.run.samples_per_s, *(row.samples_per_s for row in measured.left_out)]) == sorted(rates)


def test_more_than_n_on_n_devices_repeats_the_baseline_too() -> None:
    expected = Expectation(num_devices=2, baseline_rate=10.0)
    measured = measure(runs_of([22.8, 19.0]), expected, run_baseline=runs_of([11.0]))
    assert (measured.run.samples_per_s, measured.baseline_rate) == (19.0, 11.0)
    assert measured.reason == "2.28 × on 2 devices is more than they reach"
    # The repeated baseline counts instead of the round's.
    row = RunResult.from_dict({**measured.run.to_dict(), "baseline_samples_per_s": measured.baseline_rate})
    assert speedups_by_round({1: row}, {1: RunResult(samples_per_s=10.0)}, 2) == ((pytest.approx(19 / 11),), ())


def test_what_was_disturbed_is_named_with_its_reason() -> None:
    repeated = {"reason": "its steps varied by ±30 %", "samples_per_s": [20.0, 21.0]}
    results = {
        "run-data-1": {"samples_per_s": 21.0, "repeated": repeated},
        "run-data-2": {"samples_per_s": 20.0},
        "run-data-3": {"samples_per_s": 2.0},
        "run-serial-1": {"samples_per_s": 10.0},
        "run-serial-2": {"samples_per_s": 1.0},
        "large-data-48": {"samples_per_s": 1.0},
        "large-data-96": {"samples_per_s": 100.0},
        "samples": 3,
    }
    names = {part: part for part in results} | {
        f"run-{kind}-{number}": f"{kind}, round {number} of 3" for kind in ("data", "serial") for number in (1, 2, 3)
    }
    assert list(disturbances(results, names)) == [
        "data, round 1 of 3: its steps varied by ±30 %, so it was repeated: 20.0 then 21.0 samples/s; 21.0 counts.",
        "data: rounds of 21.0, 20.0, 2.0 samples/s differ by a factor of 10: left out: 2.0.",
        "serial: rounds of 10.0, 1.0 samples/s differ by a factor of 10: two rounds can't tell which is right; use "
        "--rounds 3.",
    ]
