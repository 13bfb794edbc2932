"""Shared by the tests of the profile: modules in a row, captured, each of them a unit."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stagewright.graph import UnitGraph, capture
from stagewright.profiler import replay


@pytest.fixture
def chain() -> Callable[..., Any]:
    def make(*parts: nn.Module, example: torch.Tensor) -> UnitGraph:
        return capture(nn.Sequential(*parts), (example,), units=[str(index) for index in range(len(parts))])

    return make


@pytest.fixture
def processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are timed by what they compute: for ratios of times that hold while others use the same core."""
    monkeypatch.setattr(replay, "time", SimpleNamespace(perf_counter=time.thread_time))
