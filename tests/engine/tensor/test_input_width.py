"""Whether an attention reads the total width of its heads from its input is found in the source of its forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stagewright.engine.tensor.regions.input_width import read_of_input_width

LAYERS = ("query", "key")


class Unpacked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        result: torch.Tensor = self.query(x).view(batch, length, width)
        return result


class Indexed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.query(x).view(-1, x.size(-1))
        return result


class Unused(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.size()
        heads = self.query(x).view(batch, length, -1, mask.shape[-1])
        result: torch.Tensor = heads.flatten(2) * heads.shape[-1]
        return result


class Sliced(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.query(x).view(*x.shape[:-1], x.shape[1], -1)
        return result


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Unpacked, "batch, length, width = x.shape"), (Indexed, "x.size(-1)"), (Unused, ""), (Sliced, "")],
)
def test_expression_that_reads_the_width(kind: type[nn.Module], expected: str) -> None:
    assert read_of_input_width(kind(), LAYERS).strip("()") == expected.strip("()")


def test_class_without_source_is_assumed_not_to() -> None:
    namespace: dict[str, Any] = {"nn": nn}
    exec("class Typed(nn.Module):\n    def forward(self, x): return self.query(x).view(-1, x.shape[2])", namespace)
    assert read_of_input_width(namespace["Typed"](), LAYERS) == ""
