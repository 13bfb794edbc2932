"""Layers that are split by channels: found by data flow, and equal to the baseline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flow_jobs import build
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from stagewright.engine.tensor.apply import plan_tensor_parallel
from stagewright.errors import UsageError


@pytest.mark.parametrize(
    "name",
    [
        "perceptron",
        "gated",
        "called dropout",
        "convolutions",
        "excitation",
        "efficientnet",
        "regnet-y",
        "attention",
        "attention, length first",
        "encoder",
    ],
)
def test_parity_with_baseline(pool_of: Callable[[int], Any], name: str) -> None:
    """Dropout is on, and running statistics are compared."""
    for result in pool_of(2).run("flow_jobs:step", name):
        errors = {key: result[key] for key in ("outputs", "gradients", "buffers", "evaluated")}
        assert max(errors.values()) < 1e-10, errors
        assert result["same_state"]
        assert result["loads"]
        assert result["share"] < 0.62


def test_four_workers(pool_of: Callable[[int], Any]) -> None:
    for name in ("convolutions", "excitation", "attention"):
        for result in pool_of(4).run("flow_jobs:step", name):
            assert max(result["outputs"], result["gradients"], result["buffers"], result["evaluated"]) < 1e-10


def test_layers_of_a_region() -> None:
    model, _ = build("convolutions")
    plan = plan_tensor_parallel(model, 2)
    region = plan.regions[0]
    assert region.owner == "1"
    assert (region.column_layers, region.row_layer) == (("1.expand",), "1.project")
    assert set(region.channelwise_layers) == {"1.norm", "1.grouped", "1.batch_norm"}
    assert (
        plan.replicated
        == "'0' and 1 more, because their output is the model's, or is normalized, reshaped, added or used twice"
    )
    gated = plan_tensor_parallel(build("gated")[0], 2).regions[0]
    assert set(gated.column_layers) == {"1.gate", "1.first"}


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("excitation", "tensor=2,pipeline=2", {"microbatches": 2}),
        ("excitation", "tensor=2,pipeline=2", {"microbatches": 2, "training": False}),
        ("regnet-y", "tensor=2,pipeline=2", {"microbatches": 2}),
        ("efficientnet", "tensor=4", {"recompute": "always"}),
    ],
)
def test_plans_equal_the_baseline(name: str, mesh: str, options: dict[str, Any], pool_of: Callable[[int], Any]) -> None:
    results = pool_of(4).run("flow_jobs:parity", name, mesh, **options)
    for result in results:
        report = result["report"]
        assert max(report.loss, report.outputs, report.gradients, report.buffers, report.updates) < 1e-10, report
    assert results[0]["bytes"] > 0


def test_squeeze_and_excitation_belongs_to_the_region_around_it() -> None:
    """The mean of all channels is reduced by a second row-parallel layer, and its gate is divided again."""
    plan = plan_tensor_parallel(build("excitation")[0], 2)
    region = plan.regions[0]
    assert region.column_layers == ("1.expand", "1.excite")
    assert (region.squeeze_layers, region.row_layer) == (("1.squeeze",), "1.project")
    assert set(region.channelwise_layers) == {"1.norm", "1.depthwise", "1.depthwise_norm"}
    efficient = plan_tensor_parallel(build("efficientnet")[0], 2)
    assert all(region.squeeze_layers and "blocks" in region.row_layer for region in efficient.regions)
    assert len(efficient.regions) == 7, "not the narrow layers between two blocks"


@pytest.mark.parametrize("pool", [nn.AdaptiveAvgPool2d(2), nn.AvgPool2d(2), nn.Identity()])
def test_a_second_row_parallel_layer_takes_a_mean_of_all_space(pool: nn.Module) -> None:
    """Others would cost a large all-reduce. Nor is the pair alone split, with dropout of single values between them."""
    model, _ = build("excitation")
    model[2].pool = pool
    assert [region.row_layer for region in plan_tensor_parallel(model, 2).regions] == ["1.project"]


@pytest.mark.parametrize(
    ("dims", "keepdim", "is_split"),
    [((2,), True, True), (-1, True, True), ((-1, -2), True, False), (1, True, False), (2, False, False)],
)
def test_a_mean_over_channels_is_refused(dims: Any, keepdim: bool, is_split: bool) -> None:
    """Sequences have one dimension of space: the second from the end has their channels."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv1d(8, 16, 1), nn.Conv1d(16, 8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x).mean(dims, keepdim=keepdim))

    if is_split:
        assert plan_tensor_parallel(Mean(), 2).regions[0].row_layer == "last"
    else:
        with pytest.raises(UsageError, match=r"tensor parallelism can't split"):
            plan_tensor_parallel(Mean(), 2)


class Between(nn.Module):
    """Two layers, and what is between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], *, first: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.last, self.between = first or nn.Linear(8, 16), nn.Linear(16, 8), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self.first(x)))


class Twice(nn.Module):
    """A layer whose output is used by two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.other = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.last(y) + self.other(y)


class Training(nn.Module):
    """Layers between which something happens in train mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.last(y.softmax(-1) if self.training else y)


def hooked() -> nn.Module:
    layer = nn.Linear(8, 16)
    layer.register_forward_hook(lambda _module, _args, output: output.flip(-1))
    return layer


def shared() -> nn.Module:
    layer = nn.Linear(16, 16)
    return nn.Sequential(layer, nn.ReLU(), layer)


@pytest.mark.parametrize(
    "model",
    [
        Between(lambda x: x.softmax(-1)),
        Between(lambda x: x - x.mean()),
        Between(lambda x: x.reshape(-1, 16)),
        Between(lambda x: x / x.shape[-1]),
        Between(lambda x: x + torch.arange(16)),
        Between(nn.LayerNorm(16)),
        Between(lambda x: x if x.sum() > 0 else -x),
        Between(torch.relu, first=hooked()),
        Between(torch.relu, first=weight_norm(nn.Linear(8, 16))),
        Twice(),
        Training(),
        shared(),
        nn.Sequential(nn.Linear(8, 16), nn.ReLU()),
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.Dropout(0.1), nn.Conv2d(8, 3, 1)),
    ],
)
def test_what_combines_channels_is_refused(model: nn.Module) -> None:
    with pytest.raises(UsageError, match=r"tensor parallelism can't split .* use data or pipeline instead"):
        plan_tensor_parallel(model, 2)


def test_finding_regions_changes_nothing() -> None:
    class Counting(Between):
        def __init__(self) -> None:
            super().__init__(torch.relu)
            self.register_buffer("calls", torch.zeros(()))
            self.last_output: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.last_output = super().forward(x)
            return self.last_output

    model = Counting().eval()
    plan = plan_tensor_parallel(model, 2)
    assert plan.regions[0].column_layers == ("first",)
    assert (float(model.calls), model.last_output, model.training) == (0.0, None, False)


def test_indivisible_channels_stay_replicated() -> None:
    model = nn.Sequential(
        *(layer for width in (15, 16) for layer in (nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8)))
    )
    plan = plan_tensor_parallel(model, 4)
    assert [region.column_layers for region in plan.regions] == [("3",)]
    with pytest.raises(UsageError, match="tensor=3 does not divide the 16 inner features"):
        plan_tensor_parallel(nn.Sequential(*model[3:]), 3)


@pytest.mark.parametrize("change", ["kdim", "add_bias_kv"])
def test_attentions_that_stay_replicated(change: str) -> None:
    options: Any = {"kdim": {"kdim": 8}, "add_bias_kv": {"add_bias_kv": True}}[change]
    model = nn.ModuleList([nn.MultiheadAttention(16, 4, **options), Between(torch.relu)])
    plan = plan_tensor_parallel(model, 2)
    assert [region.row_layer for region in plan.regions] == ["1.last"]
