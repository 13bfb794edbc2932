"""Data-parallel steps with and without mistakes, compared with the plain step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.verification.steps import build, record_baseline, verdict_of
from torch import nn

from stagewright.errors import UsageError
from stagewright.verification.diagnosis import diagnose


@pytest.mark.parametrize(
    "rows", [(range(4), range(4, 8)), (range(0, 8, 2), range(1, 8, 2)), ([3, 1, 0, 2], [7, 5, 6, 4])]
)
def test_right_replicas_are_the_same_in_any_order_of_samples(rows: Any, tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, rows=rows)
    assert verdict.same, verdict.summary()
    assert verdict.gradient_scale == 2.0
    assert max(tensor.tolerance for tensor in verdict.tensors) < 1e-4
    assert {tensor.phase for tensor in verdict.tensors} == {"before the step", "forward", "backward", "optimizer step"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_formats_have_their_own_tolerance(dtype: torch.dtype, tmp_path: Path, monkeypatch: Any) -> None:
    from tests.verification import steps

    x, y = steps.make_batch()
    monkeypatch.setattr(steps, "make_batch", lambda: (x.to(dtype), y))
    verdict = verdict_of(tmp_path, make=lambda: build().to(dtype))
    assert verdict.same, verdict.summary()
    eps = torch.finfo(dtype).eps
    assert 4 * eps <= min(t.tolerance for t in verdict.tensors if t.phase == "backward") < 0.5


@pytest.mark.parametrize(
    ("options", "module", "cause"),
    [
        ({"loss_factor": 0.5}, "4", "loss scaled"),
        ({"reduce": lambda local: local}, "4", "missing all-reduce"),
        ({"reduce": lambda local: [sum(local)] * 2}, "4", "all-reduce twice"),
        ({"rows": (range(4), range(4))}, "", "different batch"),
        ({"lr": 0.2}, "0", "learning rate scaled"),
        ({"change": lambda rank, model: model[2].weight.data.mul_(1 + rank)}, "2", "different initial weights"),
        (
            {"change": lambda rank, model: model[0].weight.data.copy_(model[0].weight.data.roll(8, 0))},
            "0",
            "wrong shard order",
        ),
    ],
)
def test_mistakes_are_named(options: Any, module: str, cause: str, tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, **options)
    assert not verdict.same
    assert verdict.module == module
    assert verdict.cause is not None
    assert verdict.cause.name == cause


def _with_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def test_batch_norm_of_replicas_is_named(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, make=_with_norm)
    assert (verdict.module, verdict.cause and verdict.cause.name) == ("1", "batch norm per replica")
    assert {"forward", "backward", "buffers"} <= set(verdict.first)


def test_a_parameter_error_of_a_percent_is_found(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, reduce=lambda local: [sum(local) / 2 * 1.01] * 2)
    assert verdict.module == "4"
    assert verdict.first["backward"].error < 0.011


def test_a_baseline_that_does_not_repeat_is_refused(tmp_path: Path) -> None:
    record_baseline(tmp_path, lambda: nn.Sequential(nn.Linear(8, 4)))
    with pytest.raises(UsageError, match="other numbers when repeated, first in 0"):
        diagnose(tmp_path, tmp_path / "exact")


def test_a_baseline_without_perturbed_runs_is_refused(tmp_path: Path) -> None:
    record_baseline(tmp_path)
    with pytest.raises(UsageError, match="no tolerance"):
        diagnose(tmp_path / "exact", tmp_path / "exact")


def test_the_baseline_equals_itself(tmp_path: Path) -> None:
    record_baseline(tmp_path)
    verdict = diagnose(tmp_path, tmp_path / "repeated")
    assert verdict.same
    assert max(tensor.error for tensor in verdict.tensors) == 0.0
