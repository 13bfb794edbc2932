"""Loss scaling: gradients are unscaled, an overflow skips the step and halves the scale."""

from __future__ import annotations

import torch
from torch import nn

from stagewright.engine.parallel.loss_scale import GROWTH_INTERVAL, INITIAL_SCALE, LossScaler


def test_overflow_halves_the_scale_and_good_steps_double_it() -> None:
    scaler = LossScaler(1, torch.device("cpu"))
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.full((3,), 2 * INITIAL_SCALE)
    scaler.unscale([parameter])
    assert parameter.grad.tolist() == [2.0, 2.0, 2.0]
    assert not scaler.overflowed
    parameter.grad[1] = float("inf")
    scaler.unscale([parameter])
    assert scaler.overflowed
    scaler.update()
    assert scaler.scale == INITIAL_SCALE / 2
    parameter.grad = torch.ones(3)
    scaler.unscale([parameter])
    for _ in range(GROWTH_INTERVAL):
        scaler.update()
    assert scaler.scale == INITIAL_SCALE
