"""A model whose code can't run the plan's micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest

import stagewright as sw
from stagewright.errors import UsageError

GRAPH_NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, nodes, edges):
        hidden = self.first(nodes)
        return self.last(torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]]))


def model():
    torch.manual_seed(0)
    return Net(), (torch.randn(40, 8), torch.randint(40, (2, 120)))
"""


def test_rows_that_are_no_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes of a graph: its edges name nodes that a smaller batch does not have."""
    (tmp_path / "graph_net.py").write_text(GRAPH_NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=r"Net fails by itself on 32 samples.*IndexError: index \d+ is out of bounds"):
        sw.compare("graph_net:model", devices=["cpu:0"], strategies=["serial"], batch=32, steps=1)
    found = sw.compare(
        "graph_net:model", devices=["cpu:0", "cpu:0"], strategies=["pipeline"], batch=40, steps=1, schedule="gpipe",
        microbatches=1,
    )  # fmt: skip
    assert [row["equal"] for row in found.to_dict()["rows"]] == [True]
