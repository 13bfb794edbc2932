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


def test_tokens_of_context_ranks() -> None:
    """The ranks with the most tokens set the pace."""
    layout = Layout(context=4, microbatch=3)
    assert [layout.rank_tokens(length) for length in (16, 17, 20, 21)] == [12, 15, 15, 18]


def test_attention_of_context_ranks() -> None:
    assert Layout.parse("cp=2").context_attention is None
    assert Layout.parse("cp=2,context_attention=all-to-all").context_attention == "all-to-all"
    plan = Plan(model=ModelSpec(name="hf:x"), batch=4, mesh=Mesh(context=2))
    assert layout_of(plan, 8).context_attention == "ring"
    assert layout_of(replace(plan, context_attention="all-to-all"), 8).context_attention == "all-to-all"


def test_parse_order_and_layers() -> None:
    layout = Layout.parse("tp=2,pp=3,dp=4,order=pp-tensor-dp,layers=5-4-3,recompute=full,recompute_layers=2-0-3")
    assert layout.order == ("pipeline", "tensor", "data", "context")
    assert [layout.stride(axis) for axis in ("pipeline", "tensor", "data")] == [1, 3, 6]
    assert layout.blocks(12) == (5, 4, 3)
    assert [layout.checkpointed(rank, blocks) for rank, blocks in enumerate(layout.layers)] == [2, 0, 3]
    assert Layout.parse("recompute=full,recompute_layers=3").checkpointed(0, 8) == 3
    assert Layout.parse("precision=fp16").precision == "float16"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp=2,order=tp-dp", "order lacks pipeline"),
        ("tp=2,order=tp-dp-pp-tp", "names an axis twice"),
        ("tp=2,order=tp-qq-pp", "unknown axis 'qq'"),
        ("pp=2,layers=4-x", "layers needs a whole number, not 'x'"),
        ("pp=2,layers=4", "layers states 1 ranks, but pipeline = 2"),
        ("pp=2,recompute_layers=4-4-4", "recompute_layers states 3 ranks, but pipeline = 2"),
        ("tp=2,dp=2,tensor=4", "states tensor twice"),
        ("tp=8,qq=2", "unknown option of a layout 'qq'"),
        ("tp=eight", "tp needs a whole number, not 'eight'"),
        ("zero=4", "ZeRO has the stages 0, 1, 2 and 3"),
        ("recompute=some", "unknown recompute 'some'"),
        ("cp=2,context_attention=tree", "unknown context_attention 'tree'"),
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
    even = (1.0,) * 4
    assert balance(8, even, 1.0, 0.0, 1.5, 3) == (3, 2, 2, 1)
    assert balance(8, even, 1.0, 0.0, 1.5, 0) == (1, 3, 2, 2), "a V brings the head back to the first rank"
    assert balance(9, (2.0, 1.0), 1.0, 0.0, 0.0, 1) == (6, 3), "twice as fast, twice as many"


@pytest.mark.parametrize(
    ("recompute", "mesh", "expected"),
    [
        ("always", Mesh(data=4), ("full", None, None)),  # without a pipeline the engine recomputes block by block
        ("except-last", Mesh(data=4), ("full", 7, None)),
        ("always", Mesh(tensor=2), ("full", None, 1)),
        ("except-last", Mesh(pipeline=4), ("full", (8, 8, 8, 0), 1)),
        ((True, False), Mesh(pipeline=2), ("full", (8, 0), 1)),
        ((False, False), Mesh(pipeline=2), ("none", None, None)),
        ("attention", Mesh(data=4), ("selective", None, None)),
        (("h.1:attention",), Mesh(data=4), ("selective", None, None)),
        (("h.0", "h.1", "h.7"), Mesh(pipeline=2), ("full", (2, 1), None)),
    ],
)
def test_recomputation_of_a_plan(recompute: object, mesh: Mesh, expected: tuple[object, ...]) -> None:
    plan = Plan(model=ModelSpec(name="hf:x"), batch=16, mesh=mesh, microbatches=4, recompute=recompute)  # type: ignore[arg-type]
    layout = layout_of(plan, 8)
    assert (layout.recompute, layout.recompute_layers) == expected[:2]
    if layout.recompute == "full":
        assert layout.checkpoint_segments == expected[2]
