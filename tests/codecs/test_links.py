"""Codecs on the links of a pipeline: parity with the baseline under the same quantization, for schedules and meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stagewright import codecs
from stagewright.codecs.catalog import EXAMPLES
from stagewright.engine.batch.microbatch import MicroBatch
from stagewright.engine.pipeline.link_codec import FakeLink, LinkCodecs, round_trip
from stagewright.engine.pipeline.transport import TensorShape, Transfer
from stagewright.errors import CorruptMessage, UsageError
from stagewright.spec.plan import Mesh, ModelSpec, Plan
from stagewright.spec.plan_file import plan_from_table, plan_to_table
from stagewright.spec.plan_rules import check_plan

SCHEDULES = ["gpipe", "1f1b", "interleaved", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev"]


def check(pool_of: Any, mesh: str, **more: Any) -> list[dict[str, Any]]:
    results = pool_of(Mesh.parse(mesh).num_workers).run("codec_jobs:check_plan_parity", mesh, **more)
    assert results[0]["equality"]["equal"], results[0]["equality"]
    assert results[0]["codec_effect"] > 1e-4, "the codecs changed nothing: were they used?"
    return results


@pytest.mark.parametrize("name", [pytest.param("block8", marks=pytest.mark.long), "hadamard4"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_workers(pool_of: Any, schedule: str, name: str) -> None:
    check(pool_of, "pipeline=2", schedule=schedule, microbatches=4, codec=name, units="leaf")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["block8", pytest.param("hadamard4", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "schedule",
    [
        schedule if schedule in ("1f1b", "interleaved", "zbv") else pytest.param(schedule, marks=pytest.mark.long)
        for schedule in SCHEDULES
    ],
)
def test_three_workers(pool_of: Any, schedule: str, name: str) -> None:
    check(pool_of, "pipeline=3", schedule=schedule, microbatches=6, codec=name, units="leaf")


RARE = ["fp8", "block4", "lloyd2", "lowrank:4", "topk:20"]


@pytest.mark.parametrize(
    "name", ["bf16", "sort3+1", "delta(block4)", *(pytest.param(name, marks=pytest.mark.slow) for name in RARE)]
)
def test_codecs(pool_of: Any, name: str) -> None:
    check(pool_of, "pipeline=2", microbatches=2, codec=name)


def test_directions_have_separate_codecs_and_bytes_are_counted(pool_of: Any) -> None:
    plain = pool_of(2).run("codec_jobs:check_plan_parity", "pipeline=2", microbatches=2)
    results = check(pool_of, "pipeline=2", microbatches=2, codec="block4", codec_backward="none")
    assert results[1]["sent_bytes"] == plain[1]["sent_bytes"]
    (raw,) = plain[0]["sent_bytes"].values()
    (small,) = results[0]["sent_bytes"].values()
    assert 0.14 < small / raw < 0.16
    assert plain[0]["codec_effect"] == 0


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["data=2,pipeline=2", "tensor=2,pipeline=2"])
def test_meshes(pool_of: Any, mesh: str) -> None:
    """Tensor parallelism reorders additions, so a value may round to the next step; the tolerance allows for it."""
    results = check(pool_of, mesh, microbatches=2, codec="block8")
    tolerance = results[0]["equality"]["tolerance"]
    limit = 1e-5 if mesh.startswith("data") else 2e-3
    assert 1e-5 <= tolerance <= limit, results[0]["equality"]


def test_inference(pool_of: Any) -> None:
    check(pool_of, "pipeline=2", microbatches=2, codec="hadamard4", training=False)


def test_masks_and_ids_are_sent_without_a_codec(pool_of: Any) -> None:
    """A float mask of -3.4e38 would not survive a codec; ids must be exact."""
    check(
        pool_of,
        "pipeline=2",
        model="bert-minilm",
        microbatches=2,
        batch=4,
        codec="block8",
        model_options={"padded": True, "sequence_length": 12, "weights": "random"},
    )


def test_auto_compresses_slow_links_only(pool_of: Any) -> None:
    (fast, _), _ = pool_of(2).run("codec_jobs:choose", "pipeline=2", 1e15, codec="auto", microbatches=2)
    assert fast == ("none",)
    forward, backward = pool_of(2).run("codec_jobs:choose", "pipeline=2", 1e5, codec="auto", microbatches=2)[0]
    assert forward[0] in ("block4", "hadamard4", "block6")
    assert backward[0] in ("block6", "block8", "hadamard8")
    both = pool_of(2).run(
        "codec_jobs:choose", "pipeline=2", None, codec="block4", codec_backward="auto", microbatches=2
    )
    assert both[0] == both[1]
    assert both[0][0] == ("block4",)


@pytest.mark.parametrize("name", ["delta(block4)", "feedback(block4)"])
def test_state_is_in_the_checkpoint_and_frozen_in_evaluation(pool_of: Any, tmp_path: Path, name: str) -> None:
    results = pool_of(2).run("codec_jobs:train_and_resume", "pipeline=2", str(tmp_path), microbatches=2, codec=name)[0]
    assert results["num_states"] > 0
    assert results["resumed"] == results["losses"][4:]
    assert results["evaluated"][0] == results["evaluated"][1]
    assert results["forgotten"] != results["resumed"]


def test_a_message_of_another_codec_is_rejected() -> None:
    batch = [MicroBatch(inputs=(torch.zeros(2, 3),), num_samples=2, weight=1.0)]
    here, there = LinkCodecs(["block4"], ["none"]), LinkCodecs(["hadamard4"], ["none"])
    for end in (here, there):
        end.begin([[True]], batch)
    message, values = Transfer(0, 0, False), torch.randn(4, 64)
    expected = TensorShape(shape=(4, 64), dtype=torch.float32)
    sent = here.encode(message, 0, values)
    assert here.num_bytes(message, 0, expected) == sent.numel()
    with pytest.raises(CorruptMessage, match="its codec is"):
        there.decode(message, 0, expected, sent)
    with pytest.raises(CorruptMessage, match="checksum"):
        here.decode(message, 0, expected, torch.cat((sent[:-1], sent[-1:] ^ 1)))
    second = here.encode(message, 0, values)  # the link is set up: no more checksums
    assert int(second[24:32].sum()) == 0
    assert torch.equal(
        here.decode(message, 0, expected, second), codecs.get("block4").decode(sent, (4, 64), values.dtype)
    )
    ids = torch.arange(6)
    assert here.encode(message, 0, ids) is ids


def test_fake_link_in_both_directions() -> None:
    values = torch.randn(5, 70, requires_grad=True)
    out = FakeLink.apply(values, "block4", "hadamard8")
    forward, backward = codecs.get("block4"), codecs.get("hadamard8")
    assert torch.equal(out, forward.decode(forward.encode(values), values.shape, values.dtype))
    gradient = torch.randn(5, 70)
    out.backward(gradient)
    assert torch.equal(values.grad, backward.decode(backward.encode(gradient), values.shape, values.dtype))


@pytest.mark.parametrize("name", EXAMPLES)
def test_float64_noise_does_not_change_messages(name: str) -> None:
    """The check in float64 relies on it. Among the values are edges of codecs: 0, 1, and equal magnitudes."""
    torch.manual_seed(0)
    values = torch.randn(40, 64, dtype=torch.float64)
    values[0], values[1], values[2, ::2] = 0, 1, 0.5
    noisy = values * (1 + 1e-15 * torch.randn(40, 64)) + 1e-16 * torch.randn(40, 64)
    decoded = round_trip(codecs.get(name), noisy)
    assert decoded.dtype is torch.float64
    difference = float((decoded - round_trip(codecs.get(name), values)).abs().max())
    assert difference < (2e-14 if name == "none" else 1e-15)  # of the zeros
    in_float32 = round_trip(codecs.get(name), values.float())
    assert torch.equal(round_trip(codecs.get(name), values).float(), in_float32)


@pytest.mark.parametrize("name", ["block4", "delta(block4)", "feedback(block4)"])
def test_links_carry_float64(name: str) -> None:
    batch = [MicroBatch(inputs=(torch.arange(4.0)[:, None],), num_samples=4, weight=1.0)]
    sender, receiver = LinkCodecs([name], [name]), LinkCodecs([name], [name])
    message, expected = Transfer(0, 0, False), TensorShape(shape=(4, 64), dtype=torch.float64)
    values = torch.randn(4, 64, dtype=torch.float64)
    errors = []
    for _ in range(3):
        for end in (sender, receiver):
            end.begin([[True]], batch)
        sent = sender.encode(message, 0, values)
        assert sender.num_bytes(message, 0, expected) == sent.numel()
        decoded = receiver.decode(message, 0, expected, sent)
        assert decoded.dtype is torch.float64
        errors.append(float((decoded - values).abs().max()))
        for end in (sender, receiver):
            end.finish()
    assert 0.05 < errors[0] < 0.5
    if name.startswith("delta"):
        assert errors[2] < 0.02 * errors[0]


def test_plans_name_codecs() -> None:
    plan = Plan(
        model=ModelSpec(name="digits-vit"), batch=8, mesh=Mesh(pipeline=3), microbatches=3,
        codec=("block4", "none"), codec_backward="block8",
    )  # fmt: skip
    check_plan(plan)
    assert [plan.codec_of(0), plan.codec_of(1), plan.codec_of(1, backward=True)] == ["block4", "none", "block8"]
    assert plan.has_codecs
    assert plan_from_table(plan_to_table(plan)) == plan
    plain = Plan(model=plan.model, batch=8)
    assert plan_from_table(plan_to_table(plain)) == plain
    assert not plain.has_codecs
    table = {**plan_to_table(plan), "codec": ["block4"]}
    with pytest.raises(UsageError, match="codec has 1 codecs for 2 cuts"):
        plan_from_table(table)
    with pytest.raises(UsageError, match="did you mean 'block4'"):
        plan_from_table({**table, "codec": "blok4"})
    with pytest.raises(UsageError, match="compresses the links of a pipeline, and serial has none"):
        plan_from_table({**plan_to_table(plain), "codec": "block4"})
