"""Errors of capture name the line, the reason in the field's words, and a fix."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stagewright.errors import CaptureError
from stagewright.graph import capture


class Lengths(nn.Module):
    """A unit that returns values of a tensor as plain numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        return self.layer(x), [int((x > 0).sum()), int((x > 1).sum())]


class Padding(nn.Module):
    """As Lumina 2: masks only if the lengths differ."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths, self.head = Lengths(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, lengths = self.lengths(x)
        use_mask = len(set(lengths)) > 1
        result: torch.Tensor = self.head(x * 2 if use_mask else x)
        return result


def test_values_of_tensors_as_plain_numbers_are_rejected_with_line_and_fix() -> None:
    torch.manual_seed(0)
    with pytest.raises(CaptureError) as caught:
        capture(Padding(), (torch.randn(2, 8),))
    message = str(caught.value)
    assert "`use_mask = len(set(lengths)) > 1`: the code between units uses the values of a tensor" in message
    assert "SymInt" not in message
    assert "move that code into a submodule and name it as a unit" in message


class Storing(nn.Module):
    """Uses what a forward hook stored."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[str, torch.Tensor] = {}
        self.body, self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8)
        self.body[0].register_forward_hook(lambda module, args, output: self.stored.update(middle=output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(x) + self.stored["middle"])
        return result


def test_results_that_a_hook_stored_are_rejected_with_its_module() -> None:
    with pytest.raises(CaptureError, match=r"'body\.0' has a forward hook; what it stores can't be used between units"):
        capture(Storing(), (torch.randn(4, 8),), units="leaf")
