"""Layers that are captured as several units, such as mixtures of experts, divide their sequences by parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sequence_jobs
import torch
from parity_jobs import assert_parity
from torch import fx

from stagewright.engine.tensor.apply import plan_tensor_parallel
from stagewright.engine.tensor.axis import TensorAxis
from stagewright.engine.tensor.sequence_plan import SequencePlan, plan_sequence_parallel
from stagewright.engine.tensor.sequence_stage import changed_in_place, divide_stage, find_divided
from stagewright.graph.capture import capture
from stagewright.graph.stage import Stage
from stagewright.graph.unit_graph import UnitGraph
from stagewright.planner.costs.tensor_shard import record_traffic, shard_alone
from stagewright.simulator.costs.tensor_traffic import stage_sequence_traffic

GPT2_UNITS = ",".join(f"transformer.h.{index}.{part}" for index in range(2) for part in ("attn", "mlp"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3-moe", {"recompute": "always"}),
        ("mixtral", {"training": False}),
        ("qwen2-moe", {}),
        ("olmoe", {}),
        ("gpt2", {"units": GPT2_UNITS}),
        ("mixtral", {"compile": "units"}),
        ("closed-mixtral", {}),  # a layer is one unit; its mixture of experts is computed whole in it
    ],
)
def test_two_workers_equal_the_baseline(name: str, options: dict[str, Any], pool_of: Callable[[int], Any]) -> None:
    """Loss, router loss and gradients, with 9 tokens: 5 and 4."""
    assert_parity(pool_of(2).run("sequence_jobs:parity", name, "tensor=2", **options))


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("mixtral", "tensor=2,pipeline=2", {"microbatches": 2}),
        ("qwen3-moe", "tensor=2,pipeline=2", {"microbatches": 4, "schedule": "zbv"}),
        ("qwen3-moe", "tensor=4", {"vocab_parallel": True}),
        ("mixtral", "data=2,tensor=2", {"shard": True}),
        ("qwen3-moe", "data=2,tensor=2", {"zero": 1, "clip": 0.1}),
    ],
)
def test_four_workers_equal_the_baseline(
    name: str, mesh: str, options: dict[str, Any], pool_of: Callable[[int], Any]
) -> None:
    """Cuts fall inside layers."""
    assert_parity(pool_of(4).run("sequence_jobs:parity", name, mesh, **options))


def test_bytes_are_those_of_the_forecast(pool_of: Callable[[int], Any]) -> None:
    """Two collectives of attention and one around the experts in each layer and direction, and one at each end."""
    results = pool_of(2).run("sequence_jobs:parity", "mixtral", "tensor=2", microbatches=2)
    assert_parity(results)
    model, graph = sequence_jobs.make_model("mixtral"), graph_of("mixtral")
    axis = shard_alone(graph, 2, sequence_parallel=True)
    traffic = stage_sequence_traffic(record_traffic(graph, axis, model.args, model.kwargs, lambda out: out["loss"]))
    hidden = 4 * 9 * 16 * 4
    assert sum(traffic.forward_bytes) == sum(traffic.backward_bytes) == 7 * hidden
    assert results[0]["bytes"] == 14 * hidden + traffic.partial_bytes
    assert traffic.partial_bytes == results[0]["partial"] == 2 * 2 * 16 * 4


def test_other_lengths(pool_of: Callable[[int], Any]) -> None:
    """Stages for other lengths, and those of evaluation, are divided too."""
    divided, whole = (pool_of(2).run("sequence_jobs:other_lengths", GPT2_UNITS, flag)[0] for flag in (True, False))
    assert divided == pytest.approx(whole, rel=1e-5)


def graph_of(name: str, units: Any = "auto") -> UnitGraph:
    model = sequence_jobs.make_model(name)
    return capture(model.module, model.args, model.kwargs, units)


def plan_of(graph: UnitGraph) -> SequencePlan:
    return plan_sequence_parallel(graph.model, plan_tensor_parallel(graph.model, 2).regions, graph.stages(()), 2)


def test_parts_of_a_mixture() -> None:
    """Router and experts are computed whole, and so are their gradients; a dense layer is one part."""
    found = plan_of(graph_of("qwen3-moe"))
    norms = ["input_layernorm", "post_attention_layernorm"]
    parts = {f"model.layers.0.{name}" for name in ("self_attn", *norms)} | {"model.layers.1"}
    assert found.parts == dict.fromkeys(parts, 9)
    assert found.partial == {f"model.layers.{layer}.{name}.weight" for layer in range(2) for name in norms}
    assert not found.whole


def test_mixtures_inside_a_block() -> None:
    """Without router logits to collect, a layer is one unit, and shards pass from one to the next."""
    found = plan_of(graph_of("closed-mixtral"))
    assert [(block.name, block.islands) for block in found.blocks] == [
        (f"model.layers.{layer}", (f"model.layers.{layer}.mlp",)) for layer in range(2)
    ]
    assert [(block.receives_shard, block.returns_shard) for block in found.blocks] == [(False, True), (True, False)]
    assert not any("mlp" in name for name in found.partial)


class _Axis(TensorAxis):
    def __init__(self) -> None:
        self.num_workers, self.index = 2, 0


def conversions(stage: Stage) -> list[str]:
    """Divide a stage; return what is divided and joined in it."""
    divide_stage(stage, plan_of(graph_of("mixtral")).parts, _Axis())
    found = [node for node in stage.graph.nodes if str(node.target).startswith("<function _named")]
    return [f"{node.target.__name__.split('_')[1]} {node.args[0]}" for node in found]


def test_values_are_converted_where_experts_begin_and_end() -> None:
    """Residuals stay divided from the first layer to the last; the experts' input is joined, their output divided."""
    assert conversions(graph_of("mixtral").stage(0, 12)) == [
        "divide model_embed_tokens",
        "join model_layers_0_post_attention_layernorm",
        "divide reshape_default",
        "join model_layers_1_post_attention_layernorm",
        "divide reshape_default_1",
        "join add_tensor_4",
    ]


def test_cuts_inside_a_layer_cross_whole() -> None:
    """After attention, its residual sum is joined for the next stage, which divides it again."""
    graph = graph_of("mixtral")
    cut = next(call.index for call in graph.calls if call.target == "model.layers.0.self_attn")
    first, second = graph.stages([cut])
    assert conversions(first)[-1] == "join add_tensor_1"
    assert conversions(second)[0] == "divide add_tensor_1"


def test_refuses_values_that_are_changed_in_place() -> None:
    """A join copies: what is written to the copy would be missing in the residual."""
    graph = fx.Graph()
    hidden = graph.placeholder("hidden")
    norm = graph.call_module("norm", (hidden,))
    view = graph.call_function(torch.ops.aten.view.default, (norm, [-1, 4]))
    write = graph.call_function(torch.ops.aten.mul_.Tensor, (view, 2.0))
    write.meta["mutates"] = (norm,)
    assert changed_in_place(graph, find_divided(graph, {"norm"})) is None, "only the copy is used later"
    graph.call_module("dropout", (norm,))
    assert changed_in_place(graph, find_divided(graph, {"norm", "dropout"})) is norm
