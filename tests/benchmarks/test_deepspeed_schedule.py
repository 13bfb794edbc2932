"""DeepSpeed's order of instructions and the longest path through it."""

from __future__ import annotations

from typing import Any

import pytest


def stage(benchmark: Any, forward_s: float, backward_s: float, message_s: float = 0.0) -> Any:
    return benchmark.Stage(forward_s=forward_s, backward_s=backward_s, message_s=message_s)


@pytest.fixture
def deepspeed(benchmark_paths: None) -> Any:
    from tables import deepspeed

    return deepspeed


def test_gradients_are_exchanged_before_activations(deepspeed: Any) -> None:
    first = [f"{kind} {index}" for kind, index in deepspeed.instructions(0, 2, 3)]
    assert first == [
        "forward 0", "send activation 0", "forward 1",
        "take gradient 0", "send activation 1", "backward 0", "forward 2",
        "take gradient 1", "send activation 2", "backward 1",
        "take gradient 2", "backward 2",
    ]  # fmt: skip
    second = [f"{kind} {index}" for kind, index in deepspeed.instructions(1, 2, 3)]
    assert second == [
        "take activation 0", "forward 0", "backward 0",
        "send gradient 0", "take activation 1", "forward 1", "backward 1",
        "send gradient 1", "take activation 2", "forward 2", "backward 2",
        "send gradient 2",
    ]  # fmt: skip


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 1), (3, 8), (4, 6)])
def test_without_messages_it_is_1f1b(deepspeed: Any, stages: int, microbatches: int) -> None:
    pipeline = [stage(deepspeed, 1.0, 2.0)] * stages
    for buffered in (False, True):
        assert deepspeed.pipeline_s(pipeline, microbatches, buffered=buffered) == 3 * (microbatches + stages - 1)


def test_a_slow_last_stage_waits_for_both_messages(deepspeed: Any) -> None:
    pipeline = [stage(deepspeed, 1.0, 1.0, 2.0), stage(deepspeed, 4.0, 4.0)]
    short, long = (deepspeed.pipeline_s(pipeline, count, buffered=True) for count in (20, 30))
    assert long - short == pytest.approx(10 * (8 + 2 + 2))


def test_buffered_messages_overlap_with_a_slow_first_stage(deepspeed: Any) -> None:
    pipeline = [stage(deepspeed, 4.0, 4.0, 2.0), stage(deepspeed, 1.0, 1.0)]
    for buffered, period in ((True, 8), (False, 8 + 2 + 2)):
        short, long = (deepspeed.pipeline_s(pipeline, count, buffered=buffered) for count in (20, 30))
        assert long - short == pytest.approx(10 * period)
