"""Shared by the tests of capture: compare a model with something that should compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stagewright import structure

Run = Callable[..., Any]


def run_from(model: nn.Module, state: dict[str, Any], run: Run, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Results, gradients, buffers and (possibly changed) inputs of one run from a given state and seed."""
    model.load_state_dict(state)
    model.zero_grad()
    torch.manual_seed(7)
    args, kwargs = structure.map_tensors(torch.clone, (args, kwargs))
    output = run(*args, **kwargs)
    leaves, spec = structure.flatten(output)
    floats = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if floats:
        sum((leaf * torch.linspace(-1, 1, leaf.numel()).view(leaf.shape)).sum() for leaf in floats).backward()
    gradients = [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
    return spec, leaves, gradients, [buffer.clone() for buffer in model.buffers()], structure.leaves((args, kwargs))


def assert_identical(expected: Any, found: Any) -> None:
    """Equal to the last bit, leaf by leaf."""
    one, other = structure.flatten(expected), structure.flatten(found)
    assert one[1] == other[1]
    for a, b in zip(one[0], other[0], strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)
        else:
            assert a == b


@pytest.fixture
def same_as() -> Run:
    """``same_as(model, run, args, kwargs)``: ``run`` does what the model does, to the last bit."""

    def check(model: nn.Module, run: Run, args: Any, kwargs: Any = None) -> None:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        expected = run_from(model, state, model, args, kwargs or {})
        found = run_from(model, state, run, args, kwargs or {})
        model.load_state_dict(state)
        assert_identical(expected, found)

    return check


@pytest.fixture
def chain() -> Callable[..., Run]:
    """``chain(graph, cuts)``: the model as a chain of stages."""

    def make(graph: Any, cuts: list[int]) -> Run:
        stages = graph.stages(cuts)

        def run(*args: Any, **kwargs: Any) -> Any:
            values = tuple(graph.flatten(args, kwargs))
            for stage in stages:
                stage.refresh_buffers()  # the model's own run may have replaced them
                values = stage(*values)
            return graph.unflatten(values)

        return run

    return make
