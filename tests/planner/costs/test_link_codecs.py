"""The codecs of a plan's cuts as a forecast counts them."""

from __future__ import annotations

import pytest
import torch
from tests.planner.conftest import plan_of

from made_profiles import profile_of, unit
from stagewright.codecs.registry import get
from stagewright.planner.costs.link_codecs import link_codecs, measure_link_codec
from stagewright.simulator.costs.link_codec import NO_CODEC
from stagewright.spec.plan import Mesh

SIZES = (1 << 14, 1 << 12, 1 << 13, 0)
PROFILE = profile_of([unit(f"u{at}", 1.0, (1.0, 1.0), crossing_bytes=size) for at, size in enumerate(SIZES)])


@pytest.mark.parametrize("name", ["bf16", "block4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ratio_is_that_of_the_message(name: str, dtype: str) -> None:
    kind = getattr(torch, dtype)
    values = torch.randn(SIZES[0] // kind.itemsize // 64, 64).to(kind)
    found = measure_link_codec(name, dtype, SIZES[0], "cpu")
    assert found.ratio == pytest.approx(get(name).encode(values, checked=False).numel() / SIZES[0])
    assert found.encode_s_per_byte > 0
    assert found.decode_s_per_byte > 0
    assert measure_link_codec(name, dtype, SIZES[0], "cpu") is found, "measured once"


def test_nothing_costs_nothing() -> None:
    assert measure_link_codec("none", "float32", 1000, "cpu") == NO_CODEC
    assert measure_link_codec("auto", "float32", 1000, "cpu") == NO_CODEC, "chosen when the run begins"
    assert measure_link_codec("bf16", "float32", 0, "cpu") == NO_CODEC
    assert measure_link_codec("bf16", "float32", 12, "cpu").ratio < 1, "a message of three numbers"


def test_each_cut_has_its_own() -> None:
    plan = plan_of(Mesh(pipeline=4), microbatches=4, codec=("bf16", "none", "block4"), codec_backward="none")
    found = link_codecs(plan, PROFILE, (0, 1, 2))
    there = [
        measure_link_codec(name, "float32", size, "cpu")
        for name, size in zip(("bf16", "none", "block4"), SIZES, strict=False)
    ]
    # Gradients come back as they are: the mean of both ways.
    assert [one.ratio for one in found] == pytest.approx([(one.ratio + 1) / 2 for one in there])
    assert [one.encode_s_per_byte for one in found] == pytest.approx([one.encode_s_per_byte / 2 for one in there])
    assert [one.decode_s_per_byte for one in found] == pytest.approx([one.decode_s_per_byte / 2 for one in there])
    assert found[1] == NO_CODEC


def test_inference_sends_one_way() -> None:
    plan = plan_of(Mesh(pipeline=2), microbatches=4, codec="bf16", codec_backward="none", training=False)
    (found,) = link_codecs(plan, PROFILE, (1,))
    assert found == measure_link_codec("bf16", "float32", SIZES[1], "cpu")
    both = plan_of(Mesh(pipeline=2), microbatches=4, codec="bf16")
    assert link_codecs(both, PROFILE, (1,))[0].ratio == pytest.approx(found.ratio)
