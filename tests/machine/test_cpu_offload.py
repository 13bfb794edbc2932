"""Weights that stay on the host and visit: the same results, gradients at home, nothing kept that comes again.

On a machine without a GPU a visit is a copy on the same device: what the modes do is the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stagewright import zoo
from stagewright.cluster.device import Device
from stagewright.graph import capture
from stagewright.machine import cpu_offload
from stagewright.profiler.saved_activations import measure_saved_activations

HERE = torch.device("cpu")


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every parameter counts as one that stayed on the host."""
    monkeypatch.setattr(cpu_offload, "is_offloaded", lambda module, place: True)


class Scaled(nn.Module):
    """Operations on parameters alone, in place on results, a tied weight, and a question for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first = nn.Parameter(torch.randn(1, 1, 6))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first = self.first.expand(tokens.shape[0], -1, -1)
        values = torch.cat([first, self.embed(tokens.to(self.scale.device))], dim=1)
        values = values * torch.sigmoid(self.scale)
        values += 1
        return self.head(values)  # type: ignore[no-any-return]


class Transposed(nn.Module):
    """A weight that is used by a view which the model makes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.embed(tokens)) @ self.embed.weight.t()  # type: ignore[no-any-return]


MODELS = ("scaled", "transposed", "lstm", "encoder", "digits-vit", "gpt-layers:2", "mobilenet-v2")


def model_of(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...], Callable[[object], torch.Tensor]]:
    if name == "scaled":
        return Scaled(), (torch.arange(12).view(3, 4) % 11,), lambda result: result.square().sum()  # type: ignore[attr-defined]
    if name == "transposed":
        return Transposed(), (torch.arange(12).view(3, 4) % 11,), lambda result: result.square().sum()  # type: ignore[attr-defined]
    if name == "lstm":
        return nn.LSTM(4, 5, 2), (torch.randn(3, 2, 4),), lambda result: result[0].sum()  # type: ignore[index]
    if name == "encoder":
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        return layer, (torch.randn(3, 4, 8),), lambda result: result.square().sum()  # type: ignore[attr-defined]
    model = zoo.load(name, batch=3)
    assert not model.kwargs
    return model.module, model.args, lambda result: model.loss(result, model.target)


@pytest.mark.parametrize("name", MODELS)
def test_a_visited_model_computes_what_the_plain_one_does(name: str, visits: None) -> None:
    module, args, loss = model_of(name)
    plain = copy.deepcopy(module)
    torch.manual_seed(1)
    expected = loss(plain(*args))
    expected.backward()  # type: ignore[no-untyped-call]
    with cpu_offload.offloaded(module, HERE):
        torch.manual_seed(1)
        found = loss(module(*args))
        found.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(found, expected)
    pairs = zip(module.named_parameters(), plain.named_parameters(), strict=True)
    for (name, one), (_, other) in pairs:
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]


def test_autograd_keeps_the_parameter_and_not_its_copy(visits: None) -> None:
    layer = nn.Linear(300, 300)
    kept: list[torch.Tensor] = []
    mode = cpu_offload._TemporaryCopies(HERE)

    def pack(tensor: torch.Tensor) -> cpu_offload._Packed:
        kept.append(mode.pack(tensor).tensor)
        return mode.pack(tensor)

    with mode, torch.autograd.graph.saved_tensors_hooks(pack, mode.unpack):
        result = layer(torch.randn(2, 300, requires_grad=True))
    assert any(one is layer.weight for one in kept)
    assert all(one is layer.weight or one.numel() < layer.weight.numel() for one in kept)
    result.sum().backward()
    assert layer.weight.grad is not None


def test_a_question_for_the_device_is_answered_with_the_device() -> None:
    layer = nn.Linear(2, 2)
    with cpu_offload._copying(torch.device("meta")):
        assert layer.weight.device.type == "meta"
        assert layer(torch.ones(1, 2, device="meta")).device.type == "meta"
        assert layer.weight.shape == (2, 2)
    assert layer.weight.device.type == "cpu"


def test_an_attribute_that_is_a_view_is_one_of_the_visitor() -> None:
    layer = nn.Linear(2, 2)
    with cpu_offload._copying(torch.device("meta")):
        assert {getattr(layer.weight, name).device.type for name in ("T", "mT", "H", "mH")} == {"meta"}
        assert not layer.weight.is_cpu
        with torch.no_grad():
            assert (torch.ones(1, 2, device="meta") @ layer.weight.T).device.type == "meta"


def set_items(weight: torch.Tensor) -> None:
    weight[:] = 3.0


def add_in_place(weight: torch.Tensor) -> None:
    weight *= 0
    weight += 3


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "method": lambda weight: weight.fill_(3.0),
    "initialisation": lambda weight: nn.init.constant_(weight, 3.0),
    "operator": lambda weight: torch.ops.aten.fill_.Scalar(weight, 3.0),
    "items": set_items,
    "in place": add_in_place,
}


@pytest.mark.parametrize("way", WRITES)
def test_a_write_reaches_the_parameter_itself(way: str, visits: None) -> None:
    layer = nn.Linear(2, 2)
    with cpu_offload.offloaded(layer, HERE), torch.no_grad():
        WRITES[way](layer.weight)
    assert torch.equal(layer.weight, torch.full((2, 2), 3.0))


class Checkpointed(nn.Module):
    """Runs again in backward what it ran forward, and notes whether its weight was a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.visited: list[bool] = []

    def part(self, values: torch.Tensor) -> torch.Tensor:
        weight = self.layer.weight
        self.visited.append(weight.detach().data_ptr() != weight.data_ptr())
        return torch.tanh(self.layer(values))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.part, values, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", ["backward", "grad"])
def test_weights_visit_where_a_checkpoint_runs_again(way: str, visits: None) -> None:
    module, values = Checkpointed(), torch.randn(3, 4)
    weights = list(module.parameters())
    expected = torch.autograd.grad(module(values).sum(), weights)
    module.visited.clear()
    with cpu_offload.offloaded(module, HERE):
        total = module(values).sum()
        if way == "backward":
            total.backward()
            found = [one.grad for one in weights]
        else:
            found = list(torch.autograd.grad(total, weights))
    assert module.visited == [True, True]
    assert all(one is not None and torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_limit_is_no_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: SimpleNamespace(total_memory=100))
    place = torch.device("cuda", 0)
    assert [cpu_offload.room_of(place, limit) for limit in (None, 40, 1000)] == [100, 40, 100]


@pytest.mark.parametrize("units", ["auto", "leaf"])
def test_a_visited_model_is_captured_as_the_plain_one(units: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, args, _ = model_of("digits-vit")
    plain = capture(module, args, units=units)
    monkeypatch.setattr(cpu_offload, "is_offloaded", lambda module, place: True)
    with cpu_offload.offloaded(module, HERE):
        found = capture(module, args, units=units)
    assert [call.name for call in found.calls] == [call.name for call in plain.calls]
    assert [cut.crossing for cut in found.cuts] == [cut.crossing for cut in plain.cuts]


@pytest.mark.parametrize("name", ["gpt-layers:2", "transposed"])
def test_copies_of_parameters_do_not_count_as_kept(name: str) -> None:
    module, args, _ = model_of(name)
    graph = capture(module, args)
    plain = measure_saved_activations(graph, args, {})
    with cpu_offload._copying(HERE):
        found = measure_saved_activations(graph, args, {})
    assert [one.saved_bytes for one in found] == [one.saved_bytes for one in plain]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
def test_a_resident_part_goes_home_unchanged() -> None:
    layer = nn.Linear(3, 3)
    before = layer.weight.data
    with cpu_offload.resident(layer, torch.device("cuda")):
        assert layer.weight.is_cuda
    assert layer.weight.data.data_ptr() == before.data_ptr()


def test_a_cpu_needs_no_visits() -> None:
    layer = nn.Linear(3, 3)
    assert cpu_offload.move_or_offload(layer, Device.parse("cpu:0").torch_device()) is layer
    assert not cpu_offload.is_offloaded(layer, HERE)


def test_parameters_without_room_stay_and_buffers_go() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    place = torch.device("meta")
    num_bytes = sum(one.numel() * one.element_size() for one in module.parameters())
    cpu_offload.move_or_offload(module, place, cpu_offload.ROOM * num_bytes - 1)
    assert cpu_offload.is_offloaded(module, place)
    assert {one.device.type for one in module.buffers()} == {"meta"}
    cpu_offload.move_or_offload(module, place, cpu_offload.ROOM * num_bytes)
    assert not cpu_offload.is_offloaded(module, place)
