from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from stagewright.profiler.replay import Replay, Result, Stopwatch, summarize, time_passes

CLOCK = Stopwatch(torch.device("cpu"))


class Spent(Stopwatch):
    """Counts what calls say that they take."""

    seconds = 0.0

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def time(self, calls: Sequence[Callable[[], Result]]) -> tuple[list[Result], float]:
        before_s = Spent.seconds
        results = [call() for call in calls]
        return results, (Spent.seconds - before_s) / len(calls)


class Slow(torch.autograd.Function):
    """The same value; takes its time in the backward pass."""

    @staticmethod
    def forward(ctx, value, backward_s):  # type: ignore[no-untyped-def]
        ctx.backward_s = backward_s
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        Spent.seconds += ctx.backward_s
        return gradient, None


class SlowUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        Spent.seconds += 0.004
        product: torch.Tensor = Slow.apply(value, 0.010) * Slow.apply(self.weight, 0.020)
        return product


def sampled(replay: Replay, clock: Stopwatch = CLOCK) -> Replay:
    replay.warm_up(clock)
    for _ in range(5):
        replay.sample(clock)
    return replay


def test_median_and_spread() -> None:
    times = summarize([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (times.median_s, times.spread_s) == (3.0, 2.0)
    assert (summarize([7.0]).median_s, summarize([7.0]).spread_s) == (7.0, 0.0)
    assert summarize([]).median_s == 0.0


def test_input_and_weight_gradients_are_separated() -> None:
    replay = Replay("slow", SlowUnit(), (torch.ones(2),), {}, training=True, needs_gradient=(True,))
    times = sampled(replay, Spent()).times()
    assert [one.median_s for one in times] == pytest.approx([0.004, 0.010, 0.020])


def test_input_without_gradient_costs_none() -> None:
    replay = Replay("first", nn.Embedding(10, 4), (torch.arange(3),), {}, training=True, needs_gradient=(False,))
    forward, for_inputs, for_weights = sampled(replay).times()
    assert for_inputs.median_s == 0.0
    assert forward.median_s > 0
    assert for_weights.median_s > 0


def test_unit_without_parameters_has_input_time_alone() -> None:
    replay = Replay("relu", nn.ReLU(), (torch.randn(50, 50),), {}, training=True, needs_gradient=(True,))
    _, for_inputs, for_weights = sampled(replay).times()
    assert for_inputs.median_s > 0
    assert for_weights.median_s == 0.0


def test_inference_has_no_backward() -> None:
    replay = Replay("linear", nn.Linear(4, 4), (torch.randn(2, 4),), {}, training=False)
    forward, for_inputs, for_weights = sampled(replay).times()
    assert forward.median_s > 0
    assert (for_inputs.median_s, for_weights.median_s) == (0.0, 0.0)


def test_in_place_unit_gets_a_copy() -> None:
    given = torch.tensor([-1.0, 2.0])
    sampled(Replay("relu", nn.ReLU(inplace=True), (given,), {}, training=True, needs_gradient=(True,)))
    assert given.tolist() == [-1.0, 2.0]
    assert not given.requires_grad


def test_same_tensor_stays_the_same() -> None:
    class Same(nn.Module):
        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            assert left is right
            return left + right

    value = torch.ones(2)
    sampled(Replay("same", Same(), (value, value), {}, training=True, needs_gradient=(True, True)))


def test_counts_macs_and_bytes() -> None:
    replay = Replay("linear", nn.Linear(8, 16), (torch.randn(2, 8),), {}, training=True)
    assert (replay.macs, replay.output_bytes) == (2 * 8 * 16, 2 * 16 * 4)
    assert replay.input_bytes() == 2 * 8 * 4


def test_a_unit_runs_in_the_autocast_of_its_call() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        replay = Replay("unit", nn.Linear(4, 4), (torch.ones(2, 4, dtype=torch.bfloat16),), {}, training=True)
    replay.sample(Stopwatch(torch.device("cpu")))
    forward, _, _ = replay.times()
    assert forward.median_s > 0


def test_passes_in_sequence() -> None:
    """The first pass takes 30 ms, each further one 20: the host has launched it already."""
    assert time_passes(lambda count: 0.030 + 0.020 * (count - 1), 3) == pytest.approx((0.030, 0.020))


def test_passes_are_timed_where_calls_return_early() -> None:
    class Asynchronous(Spent):
        is_asynchronous = True

    value = torch.ones((), requires_grad=True)
    replay = Replay("unit", SlowUnit(), (value,), {}, training=True, needs_gradient=(True,), is_whole=True)
    assert replay.pass_times(Asynchronous()) == pytest.approx((0.034, 0.034))
    assert replay.pass_times(CLOCK) == (0.0, 0.0)
