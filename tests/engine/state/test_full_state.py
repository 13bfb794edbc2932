"""Full tensors from shards."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stagewright.engine.state import full_state


def test_gathered_tensors_move_to_the_device_and_full_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model may not fit on the device; ``meta`` stands for the host."""
    layout = SimpleNamespace(gather=lambda shard, device: torch.cat([shard.to(device or shard.device)] * 2))
    monkeypatch.setattr(full_state, "shard_layouts", lambda model: {"weight": layout})
    held = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    full = full_state.full_tensors(nn.Linear(3, 4), held, torch.device("meta"))
    assert (full["weight"].shape, full["weight"].device.type) == ((4, 3), "meta")
    assert full["bias"] is held["bias"]
    assert full_state.full_tensors(nn.Linear(3, 4), held)["weight"].device.type == "cpu"
