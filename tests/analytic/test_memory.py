"""Gathered inputs that stay allocated while the host is ahead of the device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagewright.analytic.forecast import forecast_layout
from stagewright.analytic.hardware.named_cluster import named_cluster
from stagewright.analytic.layout import Layout
from stagewright.analytic.memory import ahead_bytes
from stagewright.analytic.shape import TransformerShape

SHAPE = TransformerShape(
    num_layers=16, width=1024, num_heads=16, num_key_heads=16, feed_forward=4096, num_matrices=3, vocabulary=32000,
    sequence_length=2048, tied=True, rotary=True,
)  # fmt: skip
LAYOUT = Layout(tensor=4, sequence_parallel=True, microbatches=8, microbatch=2)
# Two inputs of 2 × 2048 tokens × 1024 elements of 2 bytes, without the quarter that a rank has anyway.
BLOCK_BYTES = 2 * 2 * 2048 * 1024 * 2 * 0.75


def test_one_forward_pass_without_a_pipeline() -> None:
    assert ahead_bytes(SHAPE, LAYOUT, 0, 25) == 16 * BLOCK_BYTES
    assert ahead_bytes(SHAPE, LAYOUT, 0, 10) == 10 * BLOCK_BYTES, "the launch queue holds ten blocks"


@pytest.mark.parametrize(("ranks", "held"), [(2, [0, 0]), (4, [2 * 4, 4, 0, 0]), (8, [6 * 2, 5 * 2, 4 * 2, 3 * 2])])
def test_the_passes_of_the_warm_up_but_the_last(ranks: int, held: list[int]) -> None:
    layout = replace(LAYOUT, pipeline=ranks)
    found = [ahead_bytes(SHAPE, layout, rank, 25) / BLOCK_BYTES for rank in range(len(held))]
    assert found == held


@pytest.mark.parametrize(
    "changes",
    [{"tensor": 1}, {"sequence_parallel": False}, {"regather": False}, {"pipeline": 4, "message_stall_s": 0.3}],
)
def test_nothing_is_held_otherwise(changes: dict[str, object]) -> None:
    layout = replace(LAYOUT, **changes)  # type: ignore[arg-type]
    assert ahead_bytes(SHAPE, layout, 0, 25) == 0


def test_memory_of_a_stack_that_runs_ahead() -> None:
    cluster = named_cluster("2x8xh100")
    layout = replace(LAYOUT, data=4)
    ahead = forecast_layout(SHAPE, replace(layout, stack="nanotron"), cluster).memory[0]
    other = forecast_layout(SHAPE, layout, cluster).memory[0]
    assert ahead.temporary_bytes == pytest.approx(other.temporary_bytes + 16 * BLOCK_BYTES)
    alone = forecast_layout(SHAPE, replace(layout, data=1, stack="nanotron"), cluster).memory[0]
    assert alone.gradients_bytes < ahead.gradients_bytes, "replicas have buffers for their gradients"


def test_when_the_peak_is() -> None:
    layout = replace(LAYOUT, pipeline=4)
    ranks = forecast_layout(SHAPE, layout, named_cluster("2x8xh100")).memory
    assert [rank.when for rank in ranks] == [
        "as backward begins, 4 in flight", "as backward begins, 3 in flight", "as backward begins, 2 in flight",
        "at the loss, 1 in flight",
    ]  # fmt: skip
