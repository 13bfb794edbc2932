"""The optimiser's step and clipping are a part of the proof: what is left out or done otherwise is seen."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stagewright.engine.parallel.optimizer import make_optimizer
from stagewright.engine.parity.baseline import Baseline
from stagewright.engine.parity.optimizer_step import compare_optimizer_step
from stagewright.spec.plan import OptimizerSpec


class Worker(SimpleNamespace):
    """A worker with the interface of ``StepRunner``; ``clip_to`` and ``rate`` are what its step actually uses."""

    def __init__(self, *, clip: float | None, clip_to: float | None, rate: float, skips_last: bool) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, bias=False))
        module(torch.randn(3, 4)).square().sum().backward()
        super().__init__(
            plan=SimpleNamespace(clip=clip),
            context=SimpleNamespace(torch_device=torch.device("cpu")),
            module=module,
            shards=None,
            clip_to=clip_to,
            rate=rate,
            skips_last=skips_last,
        )

    @property
    def part(self) -> Worker:
        return self

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    optimizer_parameters = trainable_parameters

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.clip_to is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_to)
        for group in optimizer.param_groups:
            group["lr"] = self.rate
            group["params"] = group["params"][: -1 if self.skips_last else None]
        optimizer.step()


def test_unrequested_clipping_is_detected(lone_group: Any) -> None:
    """With SGD: Adam's first step is the same for any scale of the gradients."""
    worker = Worker(clip=None, clip_to=0.1, rate=1e-3, skips_last=False)
    make = partial(make_optimizer, OptimizerSpec(name="sgd", learning_rate=1e-3))
    error, worst = compare_optimizer_step(worker, make, Baseline())  # type: ignore[arg-type]
    assert error > 0.1
    assert worst.startswith("the optimizer step of ")


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        ({}, None),
        ({"clip": 0.1, "clip_to": 0.1}, None),
        ({"clip": 1e6, "clip_to": 1e6}, None),
        ({"rate": 2e-3}, "the optimizer step of "),
        ({"skips_last": True}, "the optimizer step of 1.weight"),
        ({"clip": 0.1}, "the clipped gradient of "),
        ({"clip": 0.1, "clip_to": 0.2}, "the clipped gradient of "),
    ],
)
def test_a_wrong_optimizer_step_is_detected(
    name: Any, mistake: dict[str, Any], expected: str | None, lone_group: Any
) -> None:
    worker = Worker(**{"clip": None, "clip_to": None, "rate": 1e-3, "skips_last": False, **mistake})
    before = {name: value.detach().clone() for name, value in worker.trainable_parameters().items()}
    baseline = Baseline(gradients={name: value.grad.clone() for name, value in worker.trainable_parameters().items()})
    spec = OptimizerSpec(name=name, learning_rate=1e-3, weight_decay=0.01)
    error, worst = compare_optimizer_step(worker, partial(make_optimizer, spec), baseline)  # type: ignore[arg-type]
    assert (error <= 1e-5) == (expected is None), (error, worst)
    assert expected is None or error > 0.1
    assert expected is None or worst.startswith(expected) or "clip" in mistake  # both are wrong then
    for name, value in worker.trainable_parameters().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
