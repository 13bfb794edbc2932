"""Plans with coarse codecs and split sums: rounding to other quantization steps passes, and a wrong plan does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stagewright.engine.parity.float64_step import may_be_rounding
from stagewright.report.tables.notes import parity_note
from stagewright.runs.result import ParityReport
from stagewright.spec.plan import Mesh, Plan

FAILED = ParityReport(
    equal=False, tolerance=3e-3, loss=1e-6, outputs=1e-2, gradients=1e-2, buffers=0.0, worst="gradient of x"
)
MESH = "tensor=2,pipeline=2"
PLAN = replace(Plan.of("digits-vit", 8, MESH), codec="block4", cuts=("a",))
WRONG = [
    "missing gradient", "swapped micro-batches", "gradients +1 %", "gradients +0.1 %", "loss +1 %", "loss +0.1 %",
    "encoded twice", "wrong crossing", "no codec", "wrong bits",
]  # fmt: skip


def check(pool_of: Callable[[int], Any], codecs: list[str], spoils: list[str], **more: Any) -> None:
    """Check that neither float32 nor float64 takes a spoiled plan for a right one, and float64 a right one."""
    num_workers = Mesh.parse(more.get("mesh", MESH)).num_workers
    for result in pool_of(num_workers).run("coded_jobs:check_all", codecs, spoils, **more):
        for codec, spoil, in_float32, decided in result:
            is_right = spoil == "nothing"
            assert decided.equal is is_right, (codec, spoil, decided)
            assert decided.codecs == (codec,)
            if is_right:
                assert decided.float64_error < 1e-12, (codec, decided)
            else:
                assert decided.float64_error > 5e-4, (codec, spoil, decided)
                assert in_float32.max_error > 5e-4, (codec, spoil, in_float32)
                assert "in float64 too" in parity_note("x", decided) or decided.float64_error == float("inf")


def test_a_wrong_scale_of_a_thousandth_fails(pool_of: Callable[[int], Any]) -> None:
    check(pool_of, ["hadamard4"], ["nothing", "loss +0.1 %"], mesh="pipeline=2")


@pytest.mark.parametrize("codec", ["block4", "hadamard4"])
def test_every_fault_is_found(pool_of: Callable[[int], Any], codec: str) -> None:
    check(pool_of, [codec], WRONG if codec == "block4" else ["nothing", "gradients +0.1 %", "encoded twice"])


def test_right_plans_pass_with_other_codecs(pool_of: Callable[[int], Any]) -> None:
    check(pool_of, ["bf16", "sort9+3", "lowrank:8", "topk:10", "delta(block4)", "feedback(lloyd2)"], ["nothing"])


def test_inference(pool_of: Callable[[int], Any]) -> None:
    check(pool_of, ["hadamard4"], ["nothing", "no codec"], training=False)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"equal": True}, True),  # but with a raised tolerance
        ({"equal": True, "tolerance": 1e-5}, False),
        ({"tolerance": 1e-5}, True),
        ({"outputs": 0.2}, False),
        ({"gradients": 0.2}, False),
        ({"loss": float("nan")}, False),
        ({"gradients": float("inf")}, False),
    ],
)
def test_reports_that_are_repeated(change: dict[str, Any], expected: bool) -> None:
    assert may_be_rounding(PLAN, replace(FAILED, **change)) is expected


def test_plans_that_are_repeated() -> None:
    assert may_be_rounding(replace(PLAN, mesh=Mesh(pipeline=2), training=False), FAILED)
    assert not may_be_rounding(replace(PLAN, codec="none"), FAILED)


def test_a_failed_plan_names_its_codecs_and_a_way_out() -> None:
    coded = replace(FAILED, codecs=("block4", "bf16"))
    assert parity_note("x", coded).endswith(
        "(tolerance 3e-03); codecs block4 and bf16 can turn a rounding error into a quantization step: try a finer "
        "codec, or none"
    )
    undecided = parity_note("x", replace(coded, undecided="a kernel is missing"))
    assert "could not tell whether this is rounding: a kernel is missing; codecs block4" in undecided
    assert parity_note("x", replace(coded, codecs=("block4",), float64_error=3e-2)).endswith(
        "3e-02 in float64 too, so this is not the rounding of codec block4; see whether the plan passes without a codec"
    )
