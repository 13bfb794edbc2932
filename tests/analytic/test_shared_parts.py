"""Parts of a step that many layouts share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stagewright.analytic.block import Operators
from stagewright.analytic.forecast import forecast_layout, step_model
from stagewright.analytic.hardware.devices import accelerator_of
from stagewright.analytic.hardware.named_cluster import named_cluster
from stagewright.analytic.layout import Layout
from stagewright.analytic.models import load_shape
from stagewright.analytic.pipeline import APART, SharedParts
from stagewright.analytic.step import StepModel

OTHER: dict[str, Any] = {
    "schedule": "gpipe",
    "virtual": 3,
    "zero": 3,
    "shards": 2,
    "gather_once": True,
    "recompute": "full",
    "recompute_layers": 1,
    "checkpoint_segments": 2,
    "layers": (30, 18, 24, 24),
    "message_share": 0.5,
    "message_stall_s": 0.1,
    "gradient_stall_s": 0.1,
    "optimizer_states": 1,
    "master_weights": False,
    "overlap_gradients": False,
}
BASE = Layout(data=4, tensor=4, pipeline=4, microbatches=8, sequence_parallel=True)


def model_of(layout: Layout, **changes: Any) -> StepModel:
    cluster = named_cluster("8x8xa100")
    model = step_model(load_shape("gpt3-175b", None), layout, cluster, accelerator_of(cluster.devices[0]))
    return replace(model, **changes)


def test_every_field_apart_is_tested() -> None:
    assert set(OTHER) == APART
    assert set(Layout.__dataclass_fields__) > APART


@pytest.mark.parametrize("name", sorted(APART))
def test_blocks_do_not_depend_on_it(name: str) -> None:
    changed = replace(BASE, **{name: OTHER[name]})
    fresh = model_of(changed, shared=SharedParts())
    assert model_of(changed).shared is model_of(BASE).shared
    for part in ("dense", "embedding", "head"):
        assert fresh.part(part) == model_of(BASE).part(part)
        for backward in (False, True):
            assert fresh.part_pass(part, backward=backward) == model_of(BASE).part_pass(part, backward=backward)


def test_other_fields_have_parts_of_their_own() -> None:
    for changed in (replace(BASE, microbatch=2), replace(BASE, tensor=2), replace(BASE, attention="unfused")):
        assert model_of(changed).shared is not model_of(BASE).shared
        operators = Operators(shape=model_of(changed).shape, layout=changed, kernels=model_of(changed).kernels)
        assert model_of(changed).part("dense") == operators.block(experts=False)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zbv", "dualpipev", "interleaved"])
@pytest.mark.parametrize("stack", ["stagewright", "nanotron"])
def test_the_peak_is_that_of_the_first_of_equal_ranks(schedule: Any, stack: Any) -> None:
    virtual = 1 if schedule in ("1f1b", "gpipe") else 2
    layout = replace(BASE, schedule=schedule, virtual=virtual, stack=stack)
    model = model_of(layout)
    forecast = forecast_layout(model.shape, layout, named_cluster("8x8xa100"))
    assert model.peak_memory_bytes() == forecast.peak_memory_bytes
    assert len({rank.peak_bytes for rank in forecast.memory}) > 1
