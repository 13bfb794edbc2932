"""Full tensors from parts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stagewright.engine.state import full_state


def test_what_is_gathered_goes_to_its_place_and_what_is_whole_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that may not hold all: ``meta`` stands for the host."""
    layout = SimpleNamespace(full=lambda part, place: torch.cat([part.to(place or part.device)] * 2))
    monkeypatch.setattr(full_state, "shards_of", lambda model: {"weight": layout})
    held = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    found = full_state.full_values(nn.Linear(3, 4), held, torch.device("meta"))
    assert (found["weight"].shape, found["weight"].device.type) == ((4, 3), "meta")
    assert found["bias"] is held["bias"]
    assert full_state.full_values(nn.Linear(3, 4), held)["weight"].device.type == "cpu"
