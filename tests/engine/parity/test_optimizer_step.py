"""The optimiser's step and clipping are a part of the proof: what is left out or done otherwise is seen."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stagewright.engine.jobs.measure import make_optimizer
from stagewright.engine.parity.comparison import Reference
from stagewright.engine.parity.optimizer_step import compare_updates
from stagewright.spec.plan import OptimizerSpec


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Worker(SimpleNamespace):
    """A worker that does everything, in the ways of ``Replica``; ``clip_to`` and ``rate`` are what it really does."""

    def __init__(self, *, clip: float | None, clip_to: float | None, rate: float, forgets: bool) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, bias=False))
        module(torch.randn(3, 4)).square().sum().backward()
        super().__init__(
            plan=SimpleNamespace(clip=clip),
            context=SimpleNamespace(torch_device=torch.device("cpu")),
            module=module,
            clip_to=clip_to,
            rate=rate,
            forgets=forgets,
        )

    def trained(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    def change_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        if self.clip_to is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_to)
        for group in optimizer.param_groups:
            group["lr"] = self.rate
            group["params"] = group["params"][: -1 if self.forgets else None]
        optimizer.step()


def test_clipping_that_no_one_asked_for_is_seen_where_it_matters(alone: None) -> None:
    """In Adam's first step it does not: any factor makes the same."""
    worker = Worker(clip=None, clip_to=0.1, rate=1e-3, forgets=False)
    make = partial(make_optimizer, OptimizerSpec(name="sgd", learning_rate=1e-3))
    difference, found = compare_updates(worker, make, Reference())  # type: ignore[arg-type]
    assert difference > 0.1
    assert found.startswith("the optimiser's step of ")


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize(
    ("done", "worst"),
    [
        ({}, None),
        ({"clip": 0.1, "clip_to": 0.1}, None),
        ({"clip": 1e6, "clip_to": 1e6}, None),
        ({"rate": 2e-3}, "the optimiser's step of "),
        ({"forgets": True}, "the optimiser's step of 1.weight"),
        ({"clip": 0.1}, "the clipped gradient of "),
        ({"clip": 0.1, "clip_to": 0.2}, "the clipped gradient of "),
    ],
)
def test_what_is_done_otherwise_is_seen(name: Any, done: dict[str, Any], worst: str | None, alone: None) -> None:
    worker = Worker(**{"clip": None, "clip_to": None, "rate": 1e-3, "forgets": False, **done})
    before = {name: value.detach().clone() for name, value in worker.trained().items()}
    reference = Reference(gradients={name: value.grad.clone() for name, value in worker.trained().items()})
    spec = OptimizerSpec(name=name, learning_rate=1e-3, weight_decay=0.01)
    difference, found = compare_updates(worker, partial(make_optimizer, spec), reference)  # type: ignore[arg-type]
    assert (difference <= 1e-5) == (worst is None), (difference, found)
    assert worst is None or difference > 0.1
    assert worst is None or found.startswith(worst) or "clip" in done  # both are off then
    for name, value in worker.trained().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
