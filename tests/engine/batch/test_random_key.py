"""Random masks depend on seed, step, micro-batch and unit call; not on cuts, order, recomputation or the worker."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from stagewright.engine.batch.random_key import current_key, is_keyed, key_stage, random_key
from stagewright.engine.pipeline.activation_checkpointing import CheckpointedForward
from stagewright.graph import UnitGraph, capture

CPU = torch.device("cpu")
SAMPLES, PARTS = 8, 4


class Noisy(nn.Module):
    """Dropout in units, in glue before the first unit and in glue between units; one unit is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(4))
        self.again = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(x, 0.2)
        for layer in self.layers:
            x = self.again(layer(x)) if layer in (self.layers[1], self.layers[3]) else layer(x)
            x = x + nn.functional.dropout(x, 0.4)
        return x


@pytest.fixture(scope="module")
def graph() -> UnitGraph:
    torch.manual_seed(3)
    units = [f"layers.{index}" for index in range(4)] + ["again"]
    return capture(Noisy(), (torch.randn(3, 6),), units=units)


def run(
    graph: UnitGraph,
    cuts: list[int],
    *,
    seed: int = 0,
    step: int = 0,
    order: str = "microbatches",
    policy: Any = "none",
    noise: int = 0,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and gradients of all micro-batches; stages and micro-batches in the given order."""
    graph.model.zero_grad()
    torch.manual_seed(99 + noise)
    data = torch.linspace(-1, 1, SAMPLES * 6).view(SAMPLES, 6)
    forwards = []
    for index, stage in enumerate(graph.stages(cuts)):
        key_stage(stage)
        forwards.append(CheckpointedForward(stage, policy=policy, index=index, num_microbatches=PARTS))
    values: dict[int, Any] = {number: (part,) for number, part in enumerate(data.tensor_split(PARTS))}
    pairs = [(stage, number) for number in range(PARTS) for stage in range(len(forwards))]
    if order == "stages":
        pairs.sort()
    elif order == "odd":
        mixed = random.Random(5)
        left = {number: list(range(len(forwards))) for number in range(PARTS)}
        pairs = []
        while left:
            number = mixed.choice(sorted(left))
            pairs.append((left[number].pop(0), number))
            if not left[number]:
                del left[number]
    for stage, number in pairs:
        torch.rand(noise)
        with random_key(seed=seed, step=step, first_sample=2 * number, device=CPU):
            values[number] = forwards[stage](values[number], number)
    outputs = [values[number][0] for number in range(PARTS)]
    for output in outputs:  # in one order: sums of gradients are compared to the last bit
        output.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in graph.model.parameters() if parameter.grad is not None]
    return [output.detach() for output in outputs], gradients


def assert_same(actual: Any, expected: Any) -> None:
    for a, b in zip(actual[0] + actual[1], expected[0] + expected[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("policy", ["none", "always", "except-last"])
@pytest.mark.parametrize("order", ["microbatches", "stages", "odd"])
@pytest.mark.parametrize("cuts", [[], [0], [2, 4], [0, 1, 2, 3, 4]])
def test_masks_do_not_depend_on_split_order_or_recomputation(
    graph: UnitGraph, cuts: list[int], order: str, policy: str
) -> None:
    assert len(graph.calls) == 6
    serial = run(graph, [])
    assert_same(run(graph, cuts, order=order, policy=policy, noise=3), serial)


class Sized(nn.Module):
    """A unit that takes a size: an object that the graph creates before its first unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor, size: Any) -> torch.Tensor:
        return self.inner(x) * size[-1]  # type: ignore[no-any-return]


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), Sized()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x), size=x.shape[1:])  # type: ignore[no-any-return]


def test_masks_do_not_depend_on_glue_before_the_first_unit() -> None:
    graph = capture(Late(), (torch.randn(3, 6),), units=["first", "second"])
    assert_same(run(graph, [0]), run(graph, []))


def test_masks_depend_on_the_key(graph: UnitGraph) -> None:
    serial = run(graph, [])
    for other_result in (run(graph, [], seed=1), run(graph, [], step=1)):
        assert not any(torch.equal(a, b) for a, b in zip(serial[0], other_result[0], strict=True))


def test_each_call_and_microbatch_has_its_own_mask() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Dropout(0.5), nn.Dropout(0.5))
    graph = capture(model, (torch.ones(2, 64),), units=["0", "1", "2", "3"])
    _, *stages = graph.stages([0, 1, 2])
    masks = []
    for stage in stages:
        key_stage(stage)
        for first_sample in (0, 2):
            with random_key(seed=0, step=0, first_sample=first_sample, device=CPU):
                masks.append(tuple(stage(torch.ones(2, 64))[0].flatten().tolist()))
    assert len(set(masks)) == 6
    assert all(0.3 < sum(value == 0 for value in mask) / 128 < 0.7 for mask in masks)


def test_the_default_generator_is_restored(graph: UnitGraph) -> None:
    (stage,) = graph.stages([])
    key_stage(stage)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with random_key(seed=0, step=0, first_sample=0, device=CPU):
        output = CheckpointedForward(stage, policy="always", index=0, num_microbatches=1)((torch.randn(2, 6),), 0)
    assert current_key() is None
    output[0].sum().backward()
    assert current_key() is None
    assert torch.equal(torch.rand(3), expected)


def test_without_a_key_a_keyed_stage_uses_the_default_generator(graph: UnitGraph) -> None:
    plain, keyed = graph.stage(0, 5), graph.stage(0, 5)
    key_stage(keyed)
    key_stage(keyed)  # once is enough
    assert is_keyed(keyed)
    assert not is_keyed(plain)
    assert keyed.state_dict().keys() == plain.state_dict().keys()
    x = torch.randn(2, 6)
    torch.manual_seed(1)
    expected = plain(x)[0]
    torch.manual_seed(1)
    assert torch.equal(keyed(x)[0], expected)


def test_a_key_is_the_same_in_every_process() -> None:
    with random_key(seed=1, step=2, first_sample=3, device=CPU):
        key = current_key()
        assert key is not None
        assert (key.base, key.seed_of(4)) == (13041116711478803063, 2185134304767506820)


class Permuted(nn.Module):
    """Dropout of a tensor whose dimensions are in another order in memory, as attention returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(self.first(x.transpose(0, 1)).transpose(0, 1)))


def test_masks_do_not_depend_on_the_memory_of_received_tensors() -> None:
    torch.manual_seed(3)
    model = Permuted()
    graph = capture(model, (torch.randn(3, 5, 6),), units=["first", "dropout", "last"])
    x = torch.randn(SAMPLES, 5, 6)
    results = []
    for cuts in ([], [0], [1]):
        stages = graph.stages(cuts)
        for stage in stages:
            key_stage(stage)
        with random_key(seed=1, step=0, first_sample=0, device=CPU):
            values: Any = (x,)
            for stage in stages:
                values = stage(*(value.contiguous() for value in values))
        results.append(values[0])
    assert all(torch.equal(result, results[0]) for result in results)
    assert not graph.stages([0])[0](x)[0].is_contiguous(), "otherwise nothing is tested"
