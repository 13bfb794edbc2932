"""Stages: the parameters of the user's model under their names, and nothing that is not needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stagewright.errors import UsageError
from stagewright.graph import capture


class Tied(nn.Module):
    """A head that reads the embedding's weight in the model's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)])
        self.norm = nn.LayerNorm(8)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, ids: Any) -> Any:
        x = self.table(ids) * self.scale
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(self.norm(x), self.table.weight)


def test_names_and_objects_are_the_users() -> None:
    model = Tied()
    graph = capture(model, (torch.randint(0, 10, (2, 5)),))
    first, middle, last = graph.stages([0, 2])
    assert list(first.state_dict()) == ["table.weight"]
    assert all(name.startswith("layers.") for name in middle.state_dict())
    assert sorted(last.state_dict()) == ["norm.bias", "norm.weight", "table.weight"]
    assert last.get_parameter("table.weight") is model.table.weight
    covered = set(first.state_dict()) | set(middle.state_dict()) | set(last.state_dict())
    assert covered == set(model.state_dict())
    assert [call.name for call in last.calls] == ["norm"]
    assert middle.inputs == graph.cuts[0].crossing
    assert middle.outputs == graph.cuts[2].crossing


def test_parameters_read_by_glue_belong_to_the_call_before() -> None:
    model = Tied()
    graph = capture(model, (torch.randint(0, 10, (2, 5)),))
    assert "table.weight" in graph.parameters_of(graph.calls[0])
    assert sorted(graph.parameters_of(graph.calls[3])) == ["norm.bias", "norm.weight", "table.weight"]


def test_a_stage_moves_and_converts_like_any_module() -> None:
    graph = capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.randn(2, 4),))
    stage = graph.stage(0, 0).double()
    assert stage(torch.randn(3, 4).double())[0].dtype == torch.float64


def test_recorded_calls_carry_the_real_arguments() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    graph = capture(model, (torch.randn(2, 4),))
    x = torch.randn(3, 4)
    seen = []
    for recorded in graph.record((x,)):
        seen.append((recorded.call.name, recorded.args[0].detach().clone()))
        assert recorded.module is model[recorded.call.index]
    assert [name for name, _ in seen] == ["0", "1", "2"]
    assert torch.equal(seen[1][1], model[0](x))
    assert torch.equal(seen[2][1], model[0](x).relu())


def test_an_exception_leaves_grad_mode_as_it_was() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                y = self.a(x)
                z = y * 2
            return self.b(z)

    graph = capture(Fails(), (torch.randn(2, 4),))
    graph.model.a.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("planned")))
    with pytest.raises(RuntimeError, match="planned"):
        graph(torch.randn(2, 4))
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("cuts", [[5], [1, 0], [0, 0], [-1]])
def test_wrong_cuts(cuts: list[int]) -> None:
    graph = capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), (torch.randn(2, 4),))
    with pytest.raises(UsageError, match="between 0 and 1"):
        graph.stages(cuts)


def test_table_and_dict_of_a_graph() -> None:
    graph = capture(Tied(), (torch.randint(0, 10, (2, 5)),), name="tied")
    table = graph.table()
    assert [str(row[1]) for row in table.rows] == ["table", "layers.0", "layers.1", "norm"]
    assert str(table.rows[0][-1]) == "float32[2, 5, 8]"
    assert str(graph).startswith("tied: 4 unit calls, batch 2, train mode")
    data = graph.to_dict()
    assert data["model"] == "tied"
    assert [cut["num_bytes"] for cut in data["cuts"]] == [cut.num_bytes for cut in graph.cuts]
    assert graph._repr_html_().startswith("<table>")
