"""A checkpointed stage gives bitwise equal outputs and gradients and saves only its inputs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stagewright.engine.pipeline.activation_checkpointing import CheckpointedForward, RecomputePolicy, is_recomputed
from stagewright.engine.pipeline.backward import BackwardState, run_input_backward, run_weight_backward
from stagewright.errors import UsageError
from stagewright.graph import UnitGraph, capture
from stagewright.graph.stage import Stage

BATCH, WIDTH = 6, 8
FLOAT_BYTES = 4


class Masked(nn.Module):
    """Integers, a mask and a residual cross every cut; dropout and batch norm inside."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)
        )
        self.types = nn.Embedding(11, WIDTH)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x)
        return x + self.types(ids), ids


@pytest.fixture(scope="module")
def graph() -> UnitGraph:
    torch.manual_seed(0)
    units = ["table", "types", "layers.0", "layers.1", "layers.2"]
    return capture(Masked(), (torch.randint(0, 11, (3,)),), units=units)


def run(
    graph: UnitGraph, policy: RecomputePolicy, autocast: AbstractContextManager[Any] | None = None
) -> list[torch.Tensor]:
    """Three micro-batches through three stages, forward and then backward, as GPipe does."""
    graph.model.zero_grad()
    torch.manual_seed(1)
    state = {name: value.clone() for name, value in graph.model.state_dict().items()}
    stages = graph.stages([0, 2])
    assert [value.dtype for value in stages[1].inputs] == ["int64", "float32"]
    forwards = [
        CheckpointedForward(stage, policy=policy, index=index, num_microbatches=3) for index, stage in enumerate(stages)
    ]
    held, results = [], []
    for number, part in enumerate(torch.randint(0, 11, (3 * BATCH,)).split(BATCH)):
        values: tuple[Any, ...] = (part,)
        chain = []
        for forward in forwards:
            leaves = [value.detach().requires_grad_(value.is_floating_point()) for value in values]
            with autocast or nullcontext():
                values = forward(leaves, number)
            chain.append((leaves, values))
        held.append(chain)
        results.extend(value.detach().clone() for value in values)
    for chain in held:
        gradient = torch.linspace(-1, 1, BATCH * WIDTH).view(BATCH, WIDTH)
        for leaves, values in reversed(chain):
            (output,) = [value for value in values if value.requires_grad]
            output.backward(gradient)
            results.extend(leaf.grad for leaf in leaves if leaf.grad is not None)
            gradient = results[-1]
    results.extend(parameter.grad.clone() for parameter in graph.model.parameters() if parameter.grad is not None)
    results.extend(buffer.clone() for buffer in graph.model.buffers())
    graph.model.load_state_dict(state)
    return results


@pytest.mark.parametrize("policy", ["always", "except-last", (True, False, True)])
def test_bitwise_equal(graph: UnitGraph, policy: RecomputePolicy) -> None:
    expected, results = run(graph, "none"), run(graph, policy)
    assert len(expected) == 3 * 2 + 3 * 2 + 14 + 9
    for a, b in zip(expected, results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_equal_under_autocast(graph: UnitGraph) -> None:
    plain = run(graph, "none")
    expected = run(graph, "none", torch.autocast("cpu", torch.bfloat16))
    results = run(graph, "always", torch.autocast("cpu", torch.bfloat16))
    for a, b in zip(expected, results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert not torch.equal(plain[0], expected[0])


def saved_bytes(stage: Stage, policy: RecomputePolicy, inputs: tuple[Any, ...], microbatch: int = 0) -> int:
    """Bytes of the storages that autograd saves, without parameters."""
    parameters_storage = {value.untyped_storage().data_ptr() for value in [*stage.parameters(), *stage.buffers()]}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    forward = CheckpointedForward(stage, policy=policy, index=0, num_microbatches=2)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = forward(inputs, microbatch)
    assert outputs[1].requires_grad
    return sum(storage.nbytes() for key, storage in storages.items() if key not in parameters_storage)


def test_only_inputs_are_saved(graph: UnitGraph) -> None:
    stage = graph.stage(1, 2)
    inputs = (torch.randint(0, 11, (BATCH,)), torch.randn(BATCH, WIDTH, requires_grad=True))
    inputs_bytes = BATCH * WIDTH * FLOAT_BYTES + BATCH * 8
    everything = saved_bytes(stage, "none", inputs)
    assert saved_bytes(stage, "always", inputs) == inputs_bytes
    assert saved_bytes(stage, "except-last", inputs, microbatch=0) == inputs_bytes
    assert saved_bytes(stage, "except-last", inputs, microbatch=1) == everything
    assert everything > 4 * inputs_bytes


def test_recomputation_does_not_advance_the_generator(graph: UnitGraph) -> None:
    after = []
    for policy in ("none", "always"):
        torch.manual_seed(4)
        forward = CheckpointedForward(graph.stage(1, 2), policy=policy, index=0, num_microbatches=1)
        x = torch.randn(BATCH, WIDTH, requires_grad=True)
        forward((torch.zeros(BATCH, dtype=torch.int64), x), 0)[1].sum().backward()
        after.append(torch.rand(3))
    assert torch.equal(*after)


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_stage_that_mutates_its_input(needs_gradient: bool) -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.last = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            self.act(x.view(-1, 2, 2))
            return self.last(x)

    torch.manual_seed(0)
    model = Changes()
    graph = capture(model, (torch.randn(2, 4),), units=["first", "act", "last"])
    for stage in (graph.stage(1, 2), graph.stage(1, 1)):
        results = []
        for policy in ("none", "always"):
            model.zero_grad()
            x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_(needs_gradient)
            outputs = CheckpointedForward(stage, policy=policy, index=0, num_microbatches=1)((x,), 0)
            results.append([outputs[0].detach().clone()])
            if outputs[0].requires_grad:
                outputs[0].square().sum().backward()
                results[-1].extend(
                    parameter.grad for parameter in (x, *stage.parameters()) if parameter.grad is not None
                )
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_split_backward(graph: UnitGraph) -> None:
    stage = graph.stage(1, 2)
    parameters = list(stage.parameters())
    ids = torch.zeros(BATCH, dtype=torch.int64)
    results = []
    for policy in ("none", "always"):
        graph.model.zero_grad()
        torch.manual_seed(3)
        x = torch.randn(BATCH, WIDTH, requires_grad=True)
        forward = CheckpointedForward(stage, policy=policy, index=0, num_microbatches=1)
        held = BackwardState([x], [forward((ids, x), 0)[1]])
        results.append(run_input_backward(held, [torch.ones(BATCH, WIDTH)], parameters))
        run_weight_backward(held, parameters)
        results[-1].extend(parameter.grad for parameter in parameters if parameter.grad is not None)
    assert len(results[0]) == 1 + 8
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_inference_is_not_checkpointed(graph: UnitGraph) -> None:
    forward = CheckpointedForward(graph.stage(0, 4), policy="always", index=0, num_microbatches=1)
    with torch.no_grad():
        assert not forward((torch.zeros(BATCH, dtype=torch.int64),), 0)[0].requires_grad


def test_recompute_context(graph: UnitGraph) -> None:
    entered = []
    forward = CheckpointedForward(
        graph.stage(0, 4),
        policy="always",
        index=0,
        num_microbatches=1,
        recompute_context=lambda: nullcontext(entered.append(torch.is_grad_enabled())),
    )
    output = forward((torch.zeros(BATCH, dtype=torch.int64),), 0)[0]
    assert entered == []
    output.sum().backward()
    assert entered == [True]


class Ranged(nn.Module):
    """Scales by the largest value so far, stored once in place and once in a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.largest: torch.Tensor
        self.sums: torch.Tensor
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("sums", torch.ones(4))
        self.register_buffer("constant", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.largest = torch.maximum(self.largest, x.detach().abs().max())
        self.sums += x.detach().square().sum(0)
        return x * self.constant / (self.largest * self.sums)


def test_buffers_that_a_forward_changes() -> None:
    def run(policy: RecomputePolicy) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Ranged(), nn.Tanh(), Ranged())
        (stage,) = capture(model, (torch.randn(2, 4),), units=["0", "1", "2"]).stages([])
        forward = CheckpointedForward(stage, policy=policy, index=0, num_microbatches=3)
        outputs = [forward((size * torch.randn(size, 4),), number)[0] for number, size in enumerate((1, 2, 3))]
        for output in outputs:
            output.square().sum().backward()
        return [
            *outputs,
            *(parameter.grad for parameter in stage.parameters() if parameter.grad is not None),
            *model.buffers(),
        ]

    for a, b in zip(run("none"), run("always"), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_data_parallel_wrapper() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.BatchNorm1d(4))
    graph = capture(model, (torch.randn(2, 4),), units=["0", "1", "2", "3"])
    x = torch.randn(5, 4)
    (stage,) = graph.stages([])
    stage(x)[0].square().sum().backward()
    expected = [parameter.grad.clone() for parameter in stage.parameters() if parameter.grad is not None]
    model.zero_grad()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapper = nn.parallel.DistributedDataParallel(stage)
        calls: list[None] = []
        wrapper.register_forward_pre_hook(lambda *_: calls.append(None))
        forward = CheckpointedForward(stage, policy="always", index=0, num_microbatches=1, wrapper=wrapper)
        saved: list[torch.Size] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda saved_tensor: saved.append(saved_tensor.shape) or saved_tensor, lambda saved_tensor: saved_tensor
        ):
            output = forward((x,), 0)[0]
        assert saved == [x.shape]
        output.square().sum().backward()
        assert len(calls) == 1
        assert int(model[3].num_batches_tracked) == 2
    finally:
        dist.destroy_process_group()
    for a, parameter in zip(expected, stage.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(a, parameter.grad, rtol=0, atol=0)


def test_policies() -> None:
    def of(policy: Any, stage: int = 1) -> list[bool]:
        return [is_recomputed(policy, stage=stage, microbatch=number, num_microbatches=3) for number in range(3)]

    assert of("none") == [False, False, False]
    assert of("always") == [True, True, True]
    assert of("except-last") == [True, True, False]
    assert of((False, True)) == [True, True, True]
    with pytest.raises(UsageError, match="unknown recompute 'sometimes'"):
        of("sometimes")
    with pytest.raises(UsageError, match="1 entries, but there is a stage 1"):
        of((True,))
