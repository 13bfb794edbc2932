"""What the parity check detects, and the precision it runs with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stagewright.engine.parity import check
from stagewright.engine.parity.baseline import Baseline
from stagewright.engine.parity.comparison import compare_with_baseline
from stagewright.engine.parity.tolerances import full_precision
from stagewright.report.tables.notes import parity_note
from stagewright.runs.result import ParityReport
from stagewright.spec.plan import Mesh, ModelSpec, Plan


def allow_tf32_matmul() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def disable_tf32_convolutions() -> None:
    torch.backends.cudnn.conv.fp32_precision = "ieee"


SETTINGS: dict[str, Callable[[], None]] = {
    "default": lambda: None,
    "legacy": lambda: torch.set_float32_matmul_precision("medium"),
    "new": allow_tf32_matmul,
    "new, convolutions only": disable_tf32_convolutions,
}


def current_settings() -> list[object]:
    """Read the settings by both of torch's interfaces; the legacy one raises if both were used."""
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    values: list[object] = [backend.fp32_precision == "tf32" for backend in backends]
    for legacy in (torch.get_float32_matmul_precision, lambda: torch.backends.cudnn.allow_tf32):
        try:
            values.append(legacy())
        except RuntimeError:
            values.append("mixed")
    return values


@pytest.fixture
def settings() -> Iterator[None]:
    """Restore the defaults of a new process."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


@pytest.mark.parametrize("setting", SETTINGS)
def test_full_precision_disables_tf32_and_restores_settings(setting: str, settings: None) -> None:
    SETTINGS[setting]()
    before = current_settings()
    with full_precision():
        assert current_settings()[:3] == [False, False, False]
    assert current_settings() == before


ONE, NAN = torch.ones(2), torch.tensor([float("nan"), 1.0])
BASELINE = Baseline(
    loss=1.0,
    loss_scale=1.0,
    gradients={"a.weight": ONE, "b.weight": ONE},
    buffers={"a.mean": ONE, "a.scale": ONE},
    changed=frozenset({"a.mean"}),
    outputs=[[ONE, ONE], [ONE, ONE]],
)
EQUAL: dict[str, Any] = {
    "gradients": BASELINE.gradients,
    "buffers": {"a.mean": ONE},  # the other buffer does not change: a stage need not hold it
    "outputs": {0: [ONE, ONE], 1: [ONE, ONE]},
}


@pytest.mark.parametrize(
    ("changed", "worst"),
    [
        ({}, None),
        ({"gradients": {"a.weight": ONE}}, "gradient of b.weight (missing on all workers)"),
        ({"gradients": {**BASELINE.gradients, "c.weight": 0 * ONE}}, "gradient of c.weight (missing in the baseline)"),
        ({"gradients": {**BASELINE.gradients, "b.weight": NAN}}, "gradient of b.weight"),
        ({"buffers": {}}, "buffer of a.mean (missing on all workers)"),
        ({"buffers": {"a.mean": 2 * ONE}}, "buffer of a.mean"),
        ({"outputs": {0: [ONE, ONE]}}, "output 0 of micro-batch 1 (missing on all workers)"),
        ({"outputs": {0: [ONE, ONE], 1: [ONE]}}, "output 1 of micro-batch 1 (missing on all workers)"),
        ({"outputs": {0: [ONE, ONE], 1: [ONE, ONE, ONE]}}, "output 2 of micro-batch 1 (missing in the baseline)"),
    ],
)
def test_missing_tensors_and_nan_are_not_equal(changed: dict[str, Any], worst: str | None, lone_group: Any) -> None:
    report = compare_with_baseline(
        BASELINE, loss=1.0, tolerance=1e-5, device=torch.device("cpu"), **{**EQUAL, **changed}
    )
    assert report.equal == (worst is None)
    if worst is not None:
        assert report.worst == worst
        assert f"baseline: {worst}" in parity_note("data", report)


def test_nan_equals_nan_only(lone_group: Any) -> None:
    baseline = dataclasses.replace(BASELINE, gradients={"a.weight": NAN})
    rest = {**EQUAL, "loss": 1.0, "tolerance": 1e-5, "device": torch.device("cpu")}
    assert compare_with_baseline(baseline, **{**rest, "gradients": {"a.weight": NAN}}).equal
    assert not compare_with_baseline(baseline, **{**rest, "gradients": {"a.weight": ONE}}).equal


def compare_outputs(expected: torch.Tensor, value: torch.Tensor, **fields: Any) -> ParityReport:
    """Compare two outputs; everything else is equal."""
    baseline = Baseline(loss=1.0, loss_scale=1.0, outputs=[[expected]], **fields)
    rest: dict[str, Any] = {"loss": 1.0, "gradients": {}, "buffers": {}, "tolerance": 1e-5}
    return compare_with_baseline(baseline, outputs={0: [value]}, device=torch.device("cpu"), **rest)


@pytest.mark.parametrize("mark", [-math.inf, torch.finfo(torch.float32).min])
def test_mask_values_hide_no_error(mark: float, lone_group: Any) -> None:
    expected = torch.tensor([mark, 1.0, 2.0])
    assert compare_outputs(expected, expected.clone()).equal
    assert not compare_outputs(expected, torch.tensor([mark, 2.0, 4.0])).equal


def test_imaginary_parts_types_and_counts_are_compare_outputs(lone_group: Any) -> None:
    waves = torch.tensor([1 + 2j, 3 - 1j])
    assert compare_outputs(waves, waves.clone()).equal
    assert not compare_outputs(waves, waves.conj()).equal
    assert not compare_outputs(ONE, ONE.double()).equal
    count = torch.tensor(450_000)
    assert compare_outputs(count, count.clone()).equal
    assert not compare_outputs(count, count + 1).equal


def test_rounding_sensitivity_is_bounded_and_per_tensor(lone_group: Any) -> None:
    sensitivity = {"output 0 of micro-batch 0": 0.05}
    assert compare_outputs(ONE, 1.04 * ONE, rounding_sensitivity=sensitivity).equal
    assert compare_outputs(ONE, 1.04 * ONE, rounding_sensitivity=sensitivity).tolerance == pytest.approx(0.05)
    assert not compare_outputs(ONE, 1.06 * ONE, rounding_sensitivity=sensitivity).equal
    assert not compare_outputs(ONE, 1.04 * ONE, rounding_sensitivity={"gradient of a": 0.05}).equal
    assert not compare_outputs(ONE, 1.5 * ONE, rounding_sensitivity={"output 0 of micro-batch 0": math.inf}).equal


def test_losses_that_cancel_are_scaled_by_their_absolute_sum(lone_group: Any) -> None:
    rest: dict[str, Any] = {"gradients": {}, "buffers": {}, "outputs": {}, "device": torch.device("cpu")}
    baseline = Baseline(loss=1e-7, loss_scale=2.0)
    assert compare_with_baseline(baseline, loss=3e-7, tolerance=1e-5, **rest).equal
    assert not compare_with_baseline(baseline, loss=1e-3, tolerance=1e-5, **rest).equal


def test_gradient_missing_on_one_worker_is_not_equal(lone_group: Any) -> None:
    rest = {**EQUAL, "loss": 1.0, "tolerance": 1e-5, "device": torch.device("cpu")}
    assert compare_with_baseline(BASELINE, **rest, trained={"a.weight", "b.weight", "c.weight"}).equal
    report = compare_with_baseline(BASELINE, **{**rest, "gradients": {"a.weight": ONE}}, trained={"b.weight"})
    assert (report.equal, report.worst) == (False, "gradient of b.weight (missing on a worker)")


@pytest.mark.parametrize(("data", "num_steps"), [(1, 2), (2, 3)])
@pytest.mark.parametrize("corrupted", [False, True])
def test_later_steps_are_compared_too(
    data: int, num_steps: int, corrupted: bool, lone_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients may be correct at first only: DDP buckets are used from the third step on."""
    steps: list[int] = []
    part = SimpleNamespace(
        buffers=lambda: {"a.mean": ONE.clone()},
        full_buffers=lambda: {"a.mean": ONE.clone()},
        zero_gradients=lambda: None,
        trainable_parameters=dict,
        optimizer_parameters=dict,
        shards=None,
        full_gradients=lambda lazily: {
            "a.weight": ONE,
            "b.weight": ONE * (2 if corrupted and len(steps) == num_steps else 1),
        },
    )
    runner = SimpleNamespace(
        plan=Plan(model=ModelSpec(name="made"), batch=2, mesh=Mesh(data=data)),
        context=SimpleNamespace(torch_device=torch.device("cpu"), data=0),
        model=SimpleNamespace(weights=None),
        codecs=None,
        scaler=None,
        part=part,
        train_step=lambda batch, keep_outputs: steps.append(1) or SimpleNamespace(outputs=[]),
        total_loss=lambda result: 1.0,
    )
    monkeypatch.setattr(check, "_by_microbatch", lambda _, outputs: EQUAL["outputs"])
    monkeypatch.setattr(check, "compare_optimizer_step", lambda *_: (0.0, "nothing"))
    report = check.check_parity(runner, None, BASELINE)  # type: ignore[arg-type]
    assert (len(steps), report.equal) == (num_steps, not corrupted)
    assert not corrupted or report.worst == "gradient of b.weight"


@pytest.mark.parametrize("corrupted", [False, True])
def test_the_stream_that_inference_times_is_compare_outputs(
    corrupted: bool, lone_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first round is correct, the second is not."""
    outputs = [ONE, ONE, ONE, ONE * (2 if corrupted else 1)]
    runner = SimpleNamespace(
        plan=Plan(model=ModelSpec(name="made"), batch=2, training=False, microbatches=2),
        context=SimpleNamespace(torch_device=torch.device("cpu"), data=0),
        model=SimpleNamespace(weights=None),
        codecs=None,
        scaler=None,
        part=SimpleNamespace(buffers=dict, full_buffers=dict, zero_gradients=lambda: None),
        infer=lambda batch: SimpleNamespace(outputs=[ONE, ONE]),
        stream=lambda batch, repeats: iter(outputs),
        total_loss=lambda result: 1.0,
    )
    monkeypatch.setattr(
        check, "_by_microbatch", lambda replica, outputs: dict(enumerate([output] for output in outputs))
    )
    baseline = Baseline(loss=1.0, loss_scale=1.0, outputs=[[ONE], [ONE]])
    assert check.check_parity(runner, None, baseline).equal != corrupted  # type: ignore[arg-type]
