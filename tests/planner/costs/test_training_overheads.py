from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import nn

from stagewright.planner.costs.training_overheads import _loss_saved_bytes
from stagewright.zoo.model import Model


def test_counting_what_a_loss_saves_frees_it() -> None:
    """An operation that saves its own result, as log_softmax does, must not be kept alive by it."""
    results: list[Any] = []

    def loss(output: Any, target: Any) -> torch.Tensor:
        value = torch.log_softmax(output, 1)
        results.append(weakref.ref(value))
        return nn.functional.nll_loss(value, target)

    model = Model(
        name="linear",
        module=nn.Linear(4, 10),
        args=(torch.randn(8, 4),),
        kwargs={},
        target=torch.zeros(8, dtype=torch.long),
        loss=loss,
        batch_size=8,
        make_example=lambda num_samples: None,  # type: ignore[arg-type, return-value]
    )
    saved = _loss_saved_bytes(model, torch.randn(8, 10))
    gc.collect()
    assert saved >= 8 * 10 * 4
    assert results[0]() is None
