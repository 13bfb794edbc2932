"""Plans as configurations of other trainers; their own parsers read them where they are installed."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

import stagewright as sw
from stagewright.errors import UnknownName, UsageError
from stagewright.exporters.catalog import EXPORTERS, export_plan
from stagewright.exporters.config import ExportInput
from stagewright.exporters.megatron import layout
from stagewright.spec.optimizers import OPTIMIZERS
from stagewright.spec.plan import OptimizerSpec

LLAMA = (
    ("model.embed_tokens", "model.rotary_emb", "model.layers.0"),
    ("model.layers.1", "model.layers.2", "model.norm", "lm_head"),
)


def make(mesh: str, stages: tuple[tuple[str, ...], ...] = LLAMA, **options: Any) -> ExportInput:
    defaults = {"batch": 32, "microbatches": 4, "clip": 1.0, **options}
    return ExportInput(plan=sw.Plan.of("llama-tiny", mesh=mesh, **defaults), stages=stages)


def test_torchtitan_has_the_stages_and_sizes_of_the_plan() -> None:
    exported = export_plan(make("data=2,tensor=2,pipeline=2", shard=True, recompute="always"), "torchtitan")
    table = tomllib.loads(exported.files["torchtitan.toml"])
    assert table["parallelism"] == {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": 2,
        "tensor_parallel_degree": 2,
        "pipeline_parallel_degree": 2,
        "fsdp_reshard_after_forward": "never",
        "pipeline_parallel_schedule": "1F1B",
        "pipeline_parallel_microbatch_size": 4,
        "module_fqns_per_model_part": [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "norm", "output"]],
    }
    assert (table["training"]["local_batch_size"], table["training"]["global_batch_size"]) == (16, 32)
    assert table["training"]["max_norm"] == 1.0
    assert table["activation_checkpoint"]["mode"] == "full"
    assert "--nproc-per-node 8" in exported.command


def test_torchtitans_parser_accepts_every_schedule(tmp_path: Path) -> None:
    manager = pytest.importorskip("torchtitan.config.manager")
    for schedule, stages in (("gpipe", 2), ("interleaved", 4), ("zbv", 4), ("dualpipev", 4)):
        names = LLAMA if stages == 2 else tuple((f"model.layers.{index}",) for index in range(4))
        exported = export_plan(make("pipeline=2", names, schedule=schedule, precision="bf16"), "torchtitan")
        (path,) = exported.write(tmp_path)
        config = manager.ConfigManager().parse_args([f"--job.config_file={path}"])
        assert len(config.parallelism.module_fqns_per_model_part) == stages
        from torch.distributed.pipelining.schedules import get_schedule_class

        get_schedule_class(config.parallelism.pipeline_parallel_schedule)


def test_torchtitan_gets_a_searched_order_as_a_schedule_file() -> None:
    """In the format that torch reads and writes."""
    from torch.distributed.pipelining.schedules import _Action

    actions = ("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1W0 1B1")
    searched = make("pipeline=2", schedule="searched", microbatches=2, actions=actions)
    exported = export_plan(searched, "torchtitan")
    parallelism = tomllib.loads(exported.files["torchtitan.toml"])["parallelism"]
    assert parallelism["pipeline_parallel_schedule_csv"] == "schedule.csv"
    assert parallelism["pipeline_parallel_schedule"] == "PipelineScheduleMulti"
    rows = exported.files["schedule.csv"].splitlines()
    assert [[str(_Action.from_str(text)) for text in row.split(",")] for row in rows] == [
        line.split() for line in actions
    ]
    names = tuple((f"model.layers.{index}",) for index in range(4))
    with pytest.raises(UsageError, match="places its 4 stages as a V, which torchtitan's schedule files can't express"):
        export_plan(make("pipeline=2", names, schedule="searched", cuts=("a", "b", "c"), placement="v"), "torchtitan")


@pytest.mark.parametrize(
    ("layers", "text"),
    [(((0, 1), (2,)), "E,t*2|t,L"), (((), (0, 1, 2), ()), "E|t*3|L"), (((0,), (1,), (2,), (3, 4)), "E,t|t|t|t*2,L")],
)
def test_megatron_layout(layers: tuple[tuple[int, ...], ...], text: str) -> None:
    assert layout(layers) == text


def test_megatron_arguments() -> None:
    exported = export_plan(make("data=2,pipeline=2", precision="bf16", recompute="except-last"), "megatron")
    lines = exported.files["megatron_args.txt"].splitlines()
    assert "--pipeline-model-parallel-layout E,t|t*2,L" in lines
    assert {"--num-layers 3", "--micro-batch-size 4", "--global-batch-size 32", "--bf16"} <= set(lines)
    assert "--recompute-granularity full" in lines
    assert any("each stage" in sentence for sentence in exported.omitted)


def test_sequence_parallelism() -> None:
    source = make("tensor=2", (tuple(f"model.layers.{index}" for index in range(2)),), sequence_parallel=True)
    assert "--sequence-parallel" in export_plan(source, "megatron").files["megatron_args.txt"].splitlines()
    for tool in ("accelerate", "deepspeed"):
        assert any("sequence_parallel = true" in sentence for sentence in export_plan(source, tool).omitted)


@pytest.mark.parametrize(("kind", "exchange"), [("ring", "p2p"), ("all-to-all", "a2a")])
def test_kinds_of_context_parallelism(kind: str, exchange: str) -> None:
    source = make("context=2", (tuple(f"model.layers.{index}" for index in range(2)),), context_attention=kind)
    lines = export_plan(source, "megatron").files["megatron_args.txt"].splitlines()
    assert {"--context-parallel-size 2", f"--cp-comm-type {exchange}"} <= set(lines)
    has_no_all_to_all = any("no all-to-alls" in sentence for sentence in export_plan(source, "torchtitan").omitted)
    assert has_no_all_to_all == (kind == "all-to-all")


def test_megatrons_layout_parser_reads_the_same_layers() -> None:
    module = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    parsed = module.PipelineParallelLayerLayout.parse_str_to_list("E,t*2|t,L")
    names = [[layer.name for layer in stage] for stage in parsed]
    assert names == [["embedding", "decoder", "decoder"], ["decoder", "loss"]]


def test_deepspeed() -> None:
    source = make("data=4,tensor=2", ((),), shard=True, microbatches=2, optimizer=sw_optimizer("adamw"))
    config = json.loads(export_plan(source, "deepspeed").files["deepspeed.json"])
    assert config["train_batch_size"] == 32 == config["train_micro_batch_size_per_gpu"] * 2 * 4
    assert config["zero_optimization"] == {"stage": 3}
    assert config["tensor_parallel"] == {"autotp_size": 2}
    assert config["optimizer"]["type"] == "AdamW"
    assert config["gradient_clipping"] == 1.0


def test_accelerates_parser_accepts_the_file(tmp_path: Path) -> None:
    arguments = pytest.importorskip("accelerate.commands.config.config_args")
    source = make("data=2,tensor=2", ((),), shard=True, recompute="always")
    (path,) = export_plan(source, "accelerate").write(tmp_path)
    config = arguments.load_config_from_file(str(path))
    assert config.num_processes == 4
    assert config.fsdp_config["fsdp_version"] == 2
    assert config.fsdp_config["fsdp_activation_checkpointing"] is True
    assert config.parallelism_config["parallelism_config_dp_shard_size"] == 2
    assert config.parallelism_config["parallelism_config_tp_size"] == 2


def test_accelerate_without_fsdp_is_plain_ddp() -> None:
    text = export_plan(make("data=2", ((),)), "accelerate").files["accelerate.yaml"]
    assert "distributed_type: MULTI_GPU" in text
    assert "fsdp" not in text


@pytest.mark.parametrize("tool", ["accelerate", "deepspeed"])
def test_pipelines_are_refused_where_they_cannot_be_expressed(tool: str) -> None:
    with pytest.raises(UsageError, match=r"2 pipeline stages, which .* can't express"):
        export_plan(make("pipeline=2"), tool)


def test_what_no_tool_has_is_listed() -> None:
    exported = export_plan(make("pipeline=2", codec="block4", batch_norm="deferred"), "torchtitan")
    assert sum("no counterpart" in sentence for sentence in exported.omitted) == 2


def test_refusals() -> None:
    with pytest.raises(UnknownName, match="did you mean 'megatron'"):
        export_plan(make("pipeline=2"), "megatrom")
    with pytest.raises(UsageError, match="a batch of 30 is not divisible by 1 replicas × 4"):
        export_plan(make("pipeline=2", batch=30), "torchtitan")
    with pytest.raises(UsageError, match="not a stack of numbered transformer layers"):
        export_plan(make("pipeline=2", (("fc1",), ("fc2",))), "megatron")
    names = tuple((f"model.layers.{index}",) for index in range(4))
    with pytest.raises(UsageError, match="places stages as a V"):
        export_plan(make("pipeline=2", names, schedule="zbv"), "megatron")
    with pytest.raises(UsageError, match="2 stages, but 1 lists"):
        make("pipeline=2", LLAMA[:1])


def test_stages_come_from_the_captured_model() -> None:
    plan = sw.Plan.of("mlp-mnist", 8, "pipeline=2", microbatches=2, cuts=("fc1",))
    exported = sw.export(plan, to="torchtitan")
    table = tomllib.loads(exported.files["torchtitan.toml"])
    assert table["parallelism"]["module_fqns_per_model_part"] == [["fc1"], ["fc2", "fc3", "fc4"]]
    assert set(EXPORTERS) == {"torchtitan", "megatron", "accelerate", "deepspeed", "torchrun"}


def sw_optimizer(name: Any) -> Any:
    from stagewright.spec.plan import OptimizerSpec

    return OptimizerSpec(name=name)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("tool", ["torchtitan", "megatron", "deepspeed"])
def test_every_optimizer_is_exported_or_said_to_be_another(tool: str, name: str) -> None:
    exported = export_plan(
        make("data=2", (LLAMA[0] + LLAMA[1],), optimizer=OptimizerSpec(name=name, momentum=0.9)), tool
    )
    kept = {"torchtitan": ("adam", "adamw"), "megatron": ("sgd", "adam", "adamw"), "deepspeed": tuple(OPTIMIZERS)}[tool]
    told = [text for text in exported.omitted if text.startswith("The optimizer is Adam")]
    assert bool(told) == (name not in kept)
    if tool == "deepspeed":
        optimizer = json.loads(exported.files["deepspeed.json"])["optimizer"]
        assert optimizer["type"] == OPTIMIZERS[name].torch_name
        assert optimizer["params"].get("momentum") == (0.9 if name in ("sgd", "rmsprop") else None)
