"""A stage with recomputed units gives bitwise equal outputs and gradients and saves only the inputs of these units."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from tests.engine.pipeline.test_activation_checkpointing import BATCH, FLOAT_BYTES, WIDTH, Masked, Ranged
from torch import nn

from stagewright.engine.batch.random_key import random_key
from stagewright.engine.pipeline.unit_checkpointing import checkpoint_units, has_checkpointed_units
from stagewright.graph import UnitGraph, capture
from stagewright.graph.stage import Stage

UNITS = ["table", "types", "layers.0", "layers.1", "layers.2"]


@pytest.fixture(scope="module")
def graph() -> UnitGraph:
    torch.manual_seed(0)
    return capture(Masked(), (torch.randint(0, 11, (3,)),), units=UNITS)


def run(
    graph: UnitGraph, names: Collection[str], *, keyed: bool = True, autocast: AbstractContextManager[Any] | None = None
) -> list[torch.Tensor]:
    """Three micro-batches through one stage, forward and then backward, as GPipe does."""
    graph.model.zero_grad()
    torch.manual_seed(1)
    state = {name: value.clone() for name, value in graph.model.state_dict().items()}
    (stage,) = graph.stages([])
    checkpoint_units(stage, names)
    assert has_checkpointed_units(stage) == bool(names)
    outputs = []
    for number, part in enumerate(torch.randint(0, 11, (3 * BATCH,)).split(BATCH)):
        key = random_key(seed=3, step=0, first_sample=number * BATCH, device=torch.device("cpu"))
        with key if keyed else nullcontext(), autocast or nullcontext():
            outputs.append(stage(part)[0])
    for output in outputs:
        output.backward(torch.linspace(-1, 1, BATCH * WIDTH).view(BATCH, WIDTH))
    results = [output.detach().clone() for output in outputs]
    results.extend(parameter.grad.clone() for parameter in graph.model.parameters() if parameter.grad is not None)
    results.extend(buffer.clone() for buffer in graph.model.buffers())
    results.append(torch.rand(3))
    graph.model.load_state_dict(state)
    return results


def assert_equal(expected: list[torch.Tensor], results: list[torch.Tensor]) -> None:
    for a, b in zip(expected, results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("names", [["layers.1"], ["layers.0", "layers.2"], UNITS])
def test_bitwise_equal(graph: UnitGraph, names: list[str], keyed: bool) -> None:
    """Dropout masks, batch norm statistics and the generator afterwards are those without recomputation."""
    expected = run(graph, [], keyed=keyed)
    assert len(expected) == 3 + 14 + 9 + 1
    assert_equal(expected, run(graph, names, keyed=keyed))


def test_equal_under_autocast(graph: UnitGraph) -> None:
    autocast = torch.autocast("cpu", torch.bfloat16)
    expected = run(graph, [], autocast=autocast)
    assert not torch.equal(expected[0], run(graph, [])[0])
    assert_equal(expected, run(graph, ["layers.1"], autocast=autocast))


def saved_bytes(stage: Stage, inputs: tuple[Any, ...]) -> int:
    """Bytes of the storages that autograd saves, without parameters."""
    owned = {value.untyped_storage().data_ptr() for value in [*stage.parameters(), *stage.buffers()]}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert stage(*inputs)[0].requires_grad
    return sum(storage.nbytes() for key, storage in storages.items() if key not in owned)


def test_only_inputs_of_recomputed_units_are_saved(graph: UnitGraph) -> None:
    ids = (torch.randint(0, 11, (BATCH,)),)
    hidden_bytes, ids_bytes = BATCH * WIDTH * FLOAT_BYTES, BATCH * 8
    sizes = []
    for names in ([], ["layers.1"], ["layers.0", "layers.1", "layers.2"]):
        (stage,) = graph.stages([])
        checkpoint_units(stage, names)
        sizes.append(saved_bytes(stage, ids))
    layer_bytes = (sizes[0] - ids_bytes) / 3
    assert sizes[1] == sizes[0] - layer_bytes + hidden_bytes
    assert sizes[2] == 3 * hidden_bytes + ids_bytes
    assert layer_bytes > 3 * hidden_bytes


class Changing(nn.Module):
    """A unit changes its input in place; so does a later one with the input of an earlier one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side, self.act, self.last = nn.Linear(4, 4), Side(), nn.ReLU(inplace=True), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        side = self.side(x)
        self.act(x.view(-1, 2, 2))
        return self.last(x) * side


class Side(nn.Module):
    """Its forward depends on its input, but autograd saves only a result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + 1)


@pytest.mark.parametrize("names", [["act"], ["side"], ["side", "act", "last"]])
def test_inputs_that_are_changed_in_place(names: list[str]) -> None:
    torch.manual_seed(0)
    model = Changing()
    graph = capture(model, (torch.randn(2, 4),), units=["first", "side", "act", "last"])
    results = []
    for chosen in ([], names):
        model.zero_grad()
        (stage,) = graph.stages([])
        checkpoint_units(stage, chosen)
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        output = stage(x)[0]
        output.square().sum().backward()
        results.append([output.detach(), x.grad, *(parameter.grad for parameter in model.parameters())])
    assert_equal(*results)  # type: ignore[arg-type]


def test_buffers_that_a_unit_changes() -> None:
    results = []
    for names in ([], ["0", "2"]):
        torch.manual_seed(0)
        model = nn.Sequential(Ranged(), nn.Tanh(), Ranged())
        (stage,) = capture(model, (torch.randn(2, 4),), units=["0", "1", "2"]).stages([])
        checkpoint_units(stage, names)
        outputs = [stage(size * torch.randn(size, 4))[0] for size in (1, 2, 3)]
        for output in outputs:
            output.square().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        results.append([*(output.detach() for output in outputs), *gradients, *model.buffers()])
    assert_equal(*results)


def test_one_call_of_a_shared_unit() -> None:
    """Calls of one module are chosen one by one; each draws the random numbers of its own key."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x))

    torch.manual_seed(0)
    model = Twice()
    graph = capture(model, (torch.randn(2, 4),), units=["layer"])
    assert [call.name for call in graph.calls] == ["layer", "layer@2"]
    entered: list[None] = []
    results = []
    for names in ([], ["layer@2"]):
        model.zero_grad()
        (stage,) = graph.stages([])
        checkpoint_units(stage, names, recompute_context=lambda: nullcontext(entered.append(None)))
        with random_key(seed=1, step=0, first_sample=0, device=torch.device("cpu")):
            output = stage(torch.linspace(-1, 1, 12).view(3, 4))[0]
        output.sum().backward()
        results.append([output.detach(), *(parameter.grad for parameter in model.parameters())])
    assert len(entered) == 1
    assert_equal(*results)  # type: ignore[arg-type]


def test_inference_is_not_checkpointed(graph: UnitGraph) -> None:
    (stage,) = graph.stages([])
    checkpoint_units(stage, UNITS)
    with torch.no_grad():
        assert not stage(torch.zeros(BATCH, dtype=torch.int64))[0].requires_grad
