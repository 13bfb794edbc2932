"""What workers do in the tests of clipping; run by ``pool``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from training_jobs import language, make_trainer, small

SIZES = (12, 12, 5, 12)
RATE = 0.5


def clipped(rank: int, mesh: str, schedule: str, microbatches: int, *, name: str, clip: float, **more: Any) -> Any:
    """Some steps under a plan that clips; losses, norms and the state at the end."""
    trainer = make_trainer(rank, mesh, schedule, microbatches, name=name, clip=clip, optimizer="sgd", **more)
    without_dropout(trainer.model.module)
    assert trainer.optimizer is not None
    for group in trainer.optimizer.param_groups:
        group.update(lr=RATE, momentum=0.0)
    steps = [trainer.step(trainer.model.example(size)) for size in SIZES]
    state = {key: value.numpy() for key, value in trainer.state_dict().items()}
    return {"losses": [step.loss for step in steps], "norms": [step.gradient_norm for step in steps], "state": state}


def plain(rank: int, *, name: str, clip: float) -> Any:
    """Run the same steps with torch only."""
    model = small() if name == "small" else language()
    module = without_dropout(model.module)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    losses, norms = [], []
    for size in SIZES:
        batch = model.example(size)
        optimizer.zero_grad()
        loss = model.loss(module(*batch.args), batch.target)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), clip)))
        optimizer.step()
        losses.append(float(loss.detach()))
    state = {key: value.detach().numpy().copy() for key, value in module.state_dict().items()}
    return {"losses": losses, "norms": norms, "state": state}


def without_dropout(module: nn.Module) -> nn.Module:
    for submodule in module.modules():
        if isinstance(submodule, nn.Dropout):
            submodule.p = 0.0
    return module
