"""Worker functions for tests of expert parallelism, run by ``pool``: mixtures of experts under the parity check."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from parity_jobs import checked_runner, model_with_loss, run_step
from torch import nn

from jobs import context_of, even_cuts
from stagewright.engine.expert.apply import plan_expert_parallel
from stagewright.engine.parallel.model import capture_for
from stagewright.engine.parallel.trainer import Trainer
from stagewright.errors import UsageError
from stagewright.schedules.rules import SCHEDULES
from stagewright.spec.plan import Mesh, ModelSpec, OptimizerSpec, Plan
from stagewright.zoo.model import Batch, Model

VOCABULARY, LENGTH, BATCH = 40, 6, 8
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 16, "max_position_embeddings": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "use_cache": False, "attention_dropout": 0.2,
}  # fmt: skip
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8,
            "output_router_logits": True,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1,
            "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, **_LATENT,
        },
    ),
    "llama": ("Llama", {}),
    "llama4": ("Llama4", {"num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 16}),
    "jetmoe": ("JetMoe", {"num_local_experts": 4, "num_experts_per_tok": 1, "kv_channels": 8}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 4}),
}  # fmt: skip


def make_model(name: str, *, batch: int = BATCH, num_experts: int | None = None) -> Model:
    """Build a tiny mixture of experts with dropout, and a batch of token sequences."""
    import transformers as hf

    torch.manual_seed(0)
    if name == "switch":
        config = hf.SwitchTransformersConfig(
            vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=2, num_heads=2,
            num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_experts=4, expert_capacity=3,
            dropout_rate=0.2, use_cache=False, decoder_start_token_id=0,
        )  # fmt: skip
        module: nn.Module = hf.SwitchTransformersForConditionalGeneration(config)
    else:
        kind, more = _MODELS[name]
        if num_experts is not None:
            more = {key: num_experts if key in ("num_local_experts", "num_experts") else more[key] for key in more}
        text = "Text" if name == "llama4" else ""
        module = getattr(hf, f"{kind}ForCausalLM")(getattr(hf, f"{kind}{text}Config")(**_SIZES, **more))
    return as_model(name, module, batch)


def as_model(name: str, module: nn.Module, batch: int) -> Model:
    """Give a module token sequences, whose loss it computes itself."""

    def make(count: int) -> Batch:
        ids = torch.randint(3, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(count))
        kwargs = {"input_ids": ids, "labels": ids}
        return Batch(args=(), kwargs=kwargs | ({"decoder_input_ids": ids.flip(1)} if name == "switch" else {}))

    return model_with_loss(name, module, batch, make)


def make_plan(mesh: str, model: Model, *, schedule: str = "1f1b", **more: Any) -> Plan:
    """A plan of a model, cut evenly where it has a pipeline."""
    sizes = Mesh.parse(mesh)
    plan = Plan(
        model=ModelSpec(name=model.name),
        batch=model.batch_size,
        mesh=sizes,
        schedule=schedule,  # type: ignore[arg-type]
        devices=("cpu",) * sizes.num_workers,
        **more,
    )
    num_stages = sizes.pipeline * (SCHEDULES[plan.schedule].stages_per_worker if sizes.pipeline > 1 else 1)
    calls = capture_for(plan, model).calls
    return dataclasses.replace(plan, cuts=tuple(calls[cut].name for cut in even_cuts(len(calls), num_stages)))


def parity(rank: int, name: str, mesh: str, batch: int = BATCH, **more: Any) -> dict[str, Any]:
    """Check the parity of a plan, and return what the worker holds and sends."""
    model = make_model(name, batch=batch)
    model.module.train(more.get("training", True))
    plan = make_plan(mesh, model, **more)
    num_parameters = sum(value.numel() for value in model.module.parameters())
    runner, report = checked_runner(rank, plan, model, mesh)
    axis = runner.part.expert_axis
    assert axis is not None
    axis.payload_bytes = 0
    if runner.sync.data_axis is not None:
        runner.sync.data_axis.payload_bytes = 0
    run_step(runner, model)
    experts = [value for value in runner.part.module.parameters() if id(value) in runner.part.expert_parameters]
    return {
        "report": report,
        "row_bytes": axis.payload_bytes,
        "data_bytes": 0 if runner.sync.data_axis is None else runner.sync.data_axis.payload_bytes,
        "expert_parameters": sum(value.numel() for value in experts),
        "num_parameters": num_parameters,
    }


def training(
    rank: int, name: str, mesh: str, *, sizes: tuple[int, ...], load: str = "", save: str = "", **more: Any
) -> dict[str, Any]:
    """Train some steps with batches of these sizes; return losses, evaluations and the full state."""
    model = make_model(name)
    plan = make_plan(mesh, model, optimizer=OptimizerSpec(learning_rate=0.01), **more)
    trainer = Trainer(plan, model, context_of(rank, mesh))
    if load:
        trainer.load(load)
    losses, evaluations = [], []
    for size in sizes:
        losses.append(trainer.step(model.example(size)).loss)
        evaluations.append(trainer.evaluate(model.example(3)).loss)
    if save:
        trainer.save(save)
    state = {key: value.numpy() for key, value in trainer.state_dict().items()}
    return {"losses": losses, "evaluations": evaluations, "state": state}


def refusal(name: str, num_workers: int, **more: Any) -> str:
    """Return the sentence with which a model is refused."""
    try:
        plan_expert_parallel(make_model(name, **more).module, num_workers)
    except UsageError as error:
        return str(error)
    return ""
