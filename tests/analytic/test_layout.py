"""The text of a layout, its ranks, and the layout of a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagewright.analytic.layout import Layout
from stagewright.analytic.plan_layout import balance, layout_of
from stagewright.errors import UsageError
from stagewright.spec.plan import Mesh, ModelSpec, OptimizerSpec, Plan


def test_parse() -> None:
    layout = Layout.parse("dp=4,tp=8,pp=2,vp=3,mbs=2,m=16,sp,zero=1,recompute=selective")
    assert layout == Layout(
        data=4, tensor=8, pipeline=2, virtual=3, microbatch=2, microbatches=16, sequence_parallel=True, zero=1,
        recompute="selective",
    )  # fmt: skip
    assert (layout.num_devices, layout.batch) == (64, 128)
    assert layout.stride("tensor") == 1
    assert layout.stride("data") == 8
    assert layout.stride("pipeline") == 32


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp=8,qq=2", "unknown option of a layout 'qq'"),
        ("tp=eight", "tp needs a whole number, not 'eight'"),
        ("zero=4", "ZeRO has the stages 0, 1, 2 and 3"),
        ("recompute=some", "unknown recompute 'some'"),
        ("dp=2,ep=3", "3 expert parallel ranks do not divide the 2 data parallel ranks"),
        ("tp=0", "tensor = 0, but must be at least 1"),
    ],
)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Layout.parse(text)


def test_blocks_are_as_equal_as_possible() -> None:
    assert Layout(pipeline=3).blocks(8) == (3, 3, 2)
    assert Layout(pipeline=2, layers=(5, 3)).blocks(8) == (5, 3)


def test_of_a_plan() -> None:
    plan = Plan(
        model=ModelSpec(name="hf:x"), batch=64, mesh=Mesh(data=2, tensor=2, pipeline=2), microbatches=4,
        precision="bf16", shard=True, optimizer=OptimizerSpec(name="adamw"),
    )  # fmt: skip
    layout = layout_of(plan, 8)
    assert (layout.microbatch, layout.zero, layout.stack, layout.batch) == (8, 3, "stagewright", 64)
    assert layout.stride("pipeline") == 1, "the engine places pipeline neighbors on consecutive ranks"


def test_of_a_plan_with_cuts_and_a_codec() -> None:
    plan = Plan(
        model=ModelSpec(name="hf:x"), batch=64, mesh=Mesh(pipeline=3), microbatches=4, precision="bf16",
        cuts=("model.layers.3", "model.layers.5"), recompute="always", codec="block8",
    )  # fmt: skip
    layout = layout_of(plan, 8)
    assert layout.layers == (4, 2, 2)
    assert layout.checkpoint_segments == 1, "a stage is recomputed as a whole"
    assert 0.5 <= layout.message_share < 0.6, "8 of 16 bits, and scales"
    with pytest.raises(UsageError, match="do not follow the 5 blocks"):
        layout_of(plan, 5)
    with pytest.raises(UsageError, match="has training = false"):
        layout_of(replace(plan, training=False), 8)


@pytest.mark.parametrize(
    ("precision", "optimizer", "expected"),
    [
        ("float32", OptimizerSpec(name="adamw"), ("float32", False, 4, 2)),
        ("bf16", OptimizerSpec(name="sgd", momentum=0.9), ("bfloat16", False, 2, 1)),
        ("bf16-mixed", OptimizerSpec(name="rmsprop"), ("bfloat16", True, 4, 1)),
        ("fp16-mixed", OptimizerSpec(name="sgd"), ("float16", True, 4, 0)),
    ],
)
def test_precision_and_states(precision: str, optimizer: OptimizerSpec, expected: tuple[object, ...]) -> None:
    plan = Plan(model=ModelSpec(name="hf:x"), batch=4, precision=precision, optimizer=optimizer)  # type: ignore[arg-type]
    layout = layout_of(plan, 8)
    assert (layout.precision, layout.master_weights, layout.gradient_bytes, layout.optimizer_states) == expected


def test_blocks_are_balanced_with_embedding_and_head() -> None:
    assert balance(8, 4, 1.0, 0.0, 1.5, 3) == (3, 2, 2, 1)
    assert balance(8, 4, 1.0, 0.0, 1.5, 0) == (1, 3, 2, 2), "a V brings the head back to the first rank"
