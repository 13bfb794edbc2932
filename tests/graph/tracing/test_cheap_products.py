"""Products that are replaced by cheap functions: same shapes, no mixing of samples, and wrong graphs still differ."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stagewright.errors import CaptureError
from stagewright.graph import capture
from stagewright.graph.tracing.cheap_products import cheap_products

MANY = 10**12
LAYERS = {
    "linear": (nn.Linear(6, 4), (6,)),
    "linear without bias": (nn.Linear(4, 9, bias=False), (5, 4)),
    "bilinear": (nn.Bilinear(4, 4, 3), None),
    "convolution": (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), (4, 9, 7)),
    "dilated": (nn.Conv1d(3, 2, 3, dilation=2), (3, 12)),
    "transposed": (nn.ConvTranspose2d(3, 5, 3, stride=2, output_padding=1), (3, 4, 4)),
    "3d": (nn.Conv3d(2, 3, 1), (2, 2, 3, 4)),
    "attention": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (5, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_shapes_and_strides_are_those_of_the_product(name: str) -> None:
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    args = (torch.randn(3, *shape),) if shape else (torch.randn(3, 4), torch.randn(3, 4))
    expected = layer(*args)
    with cheap_products(macs=MANY):
        found = layer(*args)
        repeated = layer(*(arg[[2, 0, 1]] for arg in args))
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert not torch.equal(found, expected) or name == "bilinear"
    if "attention" not in name:  # dropout
        torch.testing.assert_close(repeated, found[[2, 0, 1]], rtol=1e-6, atol=1e-6)
    assert (found[0] != found[1]).any()


def test_few_products_and_integers_are_computed() -> None:
    left, right = torch.arange(6).view(2, 3), torch.arange(12).view(3, 4)
    expected = left @ right
    with cheap_products(macs=MANY):
        assert torch.equal(left @ right, expected)
    with cheap_products(macs=10):
        assert torch.equal(left.float() @ right.float(), expected.float())


class PadsToFour(nn.Module):
    """A unit whose number of rows is a multiple of four: 4 for the observed batches of 2 and 3, but 8 for 5."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.layer(x)
        return nn.functional.pad(rows, (0, 0, 0, -len(x) % 4))


class CountsRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pad, self.head = PadsToFour(), nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padded = self.pad(x)
        result: torch.Tensor = self.head(padded) / padded.shape[0]
        return result


@pytest.mark.parametrize("min_macs", [0, 10**9])
def test_dependence_on_the_batch_size_is_found_without_products(monkeypatch: pytest.MonkeyPatch, min_macs: int) -> None:
    monkeypatch.setattr("stagewright.graph.tracing.cheap_products._MIN_MACS", min_macs)
    torch.manual_seed(0)
    with pytest.raises(CaptureError, match="with 5 samples the graph differs from the model"):
        capture(CountsRows(), (torch.randn(2, 64),), units=["pad", "head"])
