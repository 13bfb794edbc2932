"""Shared by the tests of the profile: modules in a row, captured, each of them a unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stagewright.capture import UnitGraph, capture


@pytest.fixture
def chain() -> Callable[..., Any]:
    def make(*parts: nn.Module, example: torch.Tensor) -> UnitGraph:
        return capture(nn.Sequential(*parts), (example,), units=[str(index) for index in range(len(parts))])

    return make
