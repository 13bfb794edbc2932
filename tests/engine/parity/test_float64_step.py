"""The comparison in float64: rounding at the kinks of ReLU passes, and a wrong plan does not."""

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
    equal=False, tolerance=1e-5, loss=1e-7, outputs=5e-7, gradients=2e-3, buffers=0.0, worst="gradient of x"
)
PLAN = Plan.of("digits-vit", 8, "tensor=2")


def test_kinks_of_relu_pass(pool_of: Callable[[int], Any]) -> None:
    for in_float32, decided in pool_of(2).run("kink_jobs:check", "nothing"):
        assert not in_float32.equal
        assert 1e-5 < in_float32.gradients < 0.1
        assert decided.equal
        assert decided.float64_error < 1e-10
        assert (decided.gradients, decided.tolerance) == (in_float32.gradients, 1e-5)


@pytest.mark.parametrize("spoil", ["drop_gradient", "swap_microbatches", "change_scale"])
def test_a_spoiled_step_needs_no_float64(pool_of: Callable[[int], Any], spoil: str) -> None:
    for in_float32, decided in pool_of(2).run("kink_jobs:check", spoil):
        assert not in_float32.equal
        assert decided == in_float32
        assert decided.float64_error is None


def test_a_wrong_gradient_of_a_thousandth_fails_in_float64(pool_of: Callable[[int], Any]) -> None:
    """In float32 it is as large as what the kinks cause."""
    for in_float32, decided in pool_of(2).run("kink_jobs:check", "scale_region_gradient"):
        assert may_be_rounding(PLAN, in_float32)
        assert not decided.equal
        assert 5e-4 < decided.float64_error < 2e-3
        assert "in float64 too" in parity_note("tensor", decided)


@pytest.mark.parametrize(
    "change",
    [
        {"equal": True},
        {"loss": 2e-5},
        {"outputs": 2e-5},
        {"buffers": 2e-5},
        {"gradients": 0.2},
        {"gradients": float("inf")},
        {"gradients": float("nan")},
        {"loss": float("nan")},
    ],
)
def test_reports_that_float32_decides(change: dict[str, Any]) -> None:
    assert may_be_rounding(PLAN, FAILED)
    assert not may_be_rounding(PLAN, replace(FAILED, **change))


@pytest.mark.parametrize(
    ("obstacle", "reason"),
    [
        ("no kernel", "the model can't run in float64 (RuntimeError: no kernel for float64)"),
        ("no kernel on worker 1", "the model can't run in float64 (RuntimeError: no kernel for float64)"),
        ("keeps float32", "the model keeps 0.weight in float32"),
        ("little memory", "each worker needs 99.8 KiB for up to 3 copies of the model, and has 1.00 KiB"),
    ],
)
def test_the_reason_why_float64_could_not_decide(pool_of: Callable[[int], Any], obstacle: str, reason: str) -> None:
    for in_float32, decided in pool_of(2).run("kink_jobs:check", "nothing", obstacle):
        assert decided == replace(in_float32, undecided=reason)
        assert parity_note("tensor", decided).endswith(f"float64 could not tell whether this is rounding: {reason}")


def test_a_gradient_that_is_only_rounding_is_decided_in_float64() -> None:
    """Where rounding alone changes the baseline's gradient by 0.1 and more, no error of the plan's says anything."""
    sensitive = replace(FAILED, tolerance=0.1, gradients=0.8)
    assert may_be_rounding(PLAN, sensitive)
    for change in ({"outputs": 2e-3}, {"gradients": float("inf")}, {"gradients": float("nan")}):
        assert not may_be_rounding(PLAN, replace(sensitive, **change))


@pytest.mark.parametrize(
    "change", [{"mesh": Mesh()}, {"mesh": Mesh(pipeline=2)}, {"training": False}, {"precision": "bf16-mixed"}]
)
def test_plans_that_float32_decides(change: dict[str, Any]) -> None:
    assert not may_be_rounding(replace(PLAN, **change), FAILED)


@pytest.mark.parametrize("mesh", ["context=2", "expert=2", "data=2", "data=2,pipeline=2", "data=2,tensor=2"])
def test_plans_that_split_sums(mesh: str) -> None:
    assert may_be_rounding(replace(PLAN, mesh=Mesh.parse(mesh)), FAILED)
