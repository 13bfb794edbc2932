"""Models and inputs that cannot be captured: one sentence that names the line, the value and a way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stagewright.errors import CaptureError, UnknownName, UsageError
from stagewright.graph import capture


class Branches(nn.Module):
    """Control flow on data between units."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        y = self.a(x)
        if y.sum() > 0:
            y = y + 1
        return self.b(y)


class SmallBranch(nn.Module):
    """The same, inside a small submodule: that one is kept whole."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x: Any, y: Any) -> Any:
            return self.parts(x) if x.sum() > 0 else self.parts(y)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate, self.head = nn.Linear(4, 40), SmallBranch.Gate(), nn.Linear(40, 40)
        self.down = nn.Linear(40, 4)

    def forward(self, x: Any) -> Any:
        return self.gate(self.down(self.head(self.stem(x))), x)


def test_branches_on_data_between_units_name_the_line_and_the_ways_out(capfd: Any) -> None:
    with pytest.raises(CaptureError) as failure:
        capture(Branches(), (torch.randn(2, 4),))
    text = str(failure.value)
    assert "if y.sum() > 0:" in text
    assert "test_capture_errors.py:" in text
    assert "branches on the values of a tensor" in text
    assert "nn.Sequential or a list of stages" in text
    assert "\n" not in text
    assert capfd.readouterr() == ("", "")


def test_a_small_submodule_that_branches_is_kept_whole(same_as: Any) -> None:
    model = SmallBranch()
    graph = capture(model, (torch.randn(2, 4),), units="leaf")
    assert [call.name for call in graph.calls][-1] == "gate"
    assert "gate is kept whole" in graph.notes[0]
    same_as(model, graph, (torch.randn(2, 4),))


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        (nn.Sequential(nn.ReLU(), nn.Tanh()), (torch.randn(2, 4),), "no parameters"),
        (nn.Linear(4, 4), (torch.randn(2, 4),), "a single unit"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), (torch.randn(2, 5),), r"\[2, 5\] torch.float32"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), (), "contains no tensor"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), (torch.randn(0, 4),), "empty tensor"),
        ("model", (torch.randn(2, 4),), "not str"),
    ],
)
def test_wrong_input_is_one_sentence(model: Any, args: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as failure:
        capture(model, args)
    assert "\n" not in str(failure.value)


def test_unknown_units_offer_the_nearest_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with pytest.raises(UnknownName, match="auto"):
        capture(model, (torch.randn(2, 4),), units="autos")
    with pytest.raises(UnknownName, match="unknown unit '7'"):
        capture(model, (torch.randn(2, 4),), units=["7"])


def test_calls_that_do_not_fit_the_example() -> None:
    graph = capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), (torch.randn(2, 4),))
    with pytest.raises(UsageError, match=r"\[2, 5\].*\['batch', 4\]"):
        graph(torch.randn(2, 5))
    with pytest.raises(UsageError, match="float64"):
        graph(torch.randn(2, 4).double())
    with pytest.raises(UsageError, match="keyword"):
        graph(torch.randn(2, 4), mask=None)
    with pytest.raises(UsageError, match="was a tensor at capture"):
        graph("x")
