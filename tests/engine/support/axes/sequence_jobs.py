"""Worker functions for tests of sequence parallelism, run by ``pool``: whole plans under the parity check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp_jobs
import torch
import vocabulary_jobs
from expert_jobs import make_plan
from parity_jobs import checked_traffic, compare_resumed, model_with_loss

from jobs import context_of
from stagewright.engine.parallel.trainer import Trainer
from stagewright.spec.plan import OptimizerSpec
from stagewright.zoo.model import Batch, Model

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "moe_intermediate_size": 8, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "attention_bias": True,
}  # fmt: skip
_MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "router_jitter_noise": 0.1}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 8, "mlp_only_layers": [1]}),
    "qwen2-moe": ("Qwen2Moe", {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}),
    "olmoe": ("Olmoe", {"num_experts": 4}),
    "deepseek-v3": ("DeepseekV3", _LATENT),
    "closed-deepseek-v3": ("DeepseekV3", _LATENT | {"output_router_logits": False}),
    "deepseek-v2": ("DeepseekV2", _LATENT | {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek-v3.2": ("DeepseekV32", _LATENT),
    "glm4-moe-lite": ("Glm4MoeLite", _LATENT),
    "longcat": ("LongcatFlash", _LATENT | {"ffn_hidden_size": 16, "expert_ffn_hidden_size": 8, "head_dim": 4}),
    "minicpm3": ("MiniCPM3", _LATENT),
    "mistral4": ("Mistral4", _LATENT),
    "flint": ("Flint", {"num_local_experts": 4, "output_router_logits": False}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4}),
    "closed-gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "head_dim": 8,
            "sliding_window": 4,
            "num_key_value_heads": 4,
            "output_router_logits": False,
        },
    ),
    "closed-mixtral": ("Mixtral", {"num_local_experts": 4, "output_router_logits": False}),
}
"""Layers are captured as several units where the model collects their router logits."""


def make_mixture(name: str) -> Model:
    """Build a tiny mixture of experts with dropout in attention, and a batch of 9 tokens a sample."""
    import transformers as hf

    torch.manual_seed(0)
    kind, more = _MIXTURES[name]
    config = getattr(hf, f"{kind}Config")(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=16, max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        use_cache=False, attention_dropout=0.2, num_experts_per_tok=2,
        **{"num_key_value_heads": 4, "output_router_logits": True, **more},
    )  # fmt: skip

    def make(count: int) -> Batch:
        ids = torch.randint(3, 40, (count, 9), generator=torch.Generator().manual_seed(count))
        return Batch(args=(), kwargs={"input_ids": ids, "labels": ids})

    return model_with_loss(name, getattr(hf, f"{kind}ForCausalLM")(config), 4, make)


def make_model(name: str) -> Model:
    """Build a tiny transformer with dropout: llama, gpt2, bert, t5 with 8 tokens, mixtures with 9, or vit with 17."""
    if name in _MIXTURES:
        return make_mixture(name)
    return fsdp_jobs.make_vit(16) if name == "vit" else vocabulary_jobs.make_model(name)


def parity(rank: int, name: str, mesh: str, **more: Any) -> dict[str, Any]:
    """Check the parity of a plan; return the report, the bytes of the tensor axis, and the saved activations."""
    model = make_model(name)
    model.module.train(more.get("training", True))
    plan = make_plan(mesh, model, **{"sequence_parallel": True, **more})
    runner, report, sent = checked_traffic(rank, plan, model, mesh, lambda runner: runner.part.tensor_axis)
    partial = sum(value.numel() * value.element_size() for value in runner.part.divided_parameters())
    return {"report": report, "bytes": sent, "partial": partial, "replicated": runner.part.replicated}


def other_lengths(rank: int, units: str, divided: bool) -> list[float]:
    """Train GPT-2 with batches of the example's length and of others, and evaluate; return the losses."""
    model = make_model("gpt2")
    plan = make_plan("tensor=2", model, sequence_parallel=divided, units=units)
    trainer = Trainer(plan, model, context_of(rank, "tensor=2"))
    whole = model.example(vocabulary_jobs.BATCH).kwargs

    def batch(length: int) -> Batch:
        return Batch(kwargs={name: value[:, :length] for name, value in whole.items()})

    losses = [float(trainer.step(batch(length)).loss) for length in (8, 6, 4, 6)]
    return [*losses, *(float(trainer.evaluate(batch(length)).loss) for length in (8, 6))]


def resumed_elsewhere(rank: int, folder: str, name: str, before: str, after: str) -> float:
    """Train two steps of a mixture, save, and train two more under another mesh; compare with training on."""

    def trainer(is_after: bool) -> Trainer:
        model, mesh = make_mixture(name), after if is_after else before
        model.module.config.attention_dropout = 0.0
        for module in model.module.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0  # type: ignore[assignment]
        optimizer = OptimizerSpec(name="adamw", learning_rate=0.01)
        return Trainer(make_plan(mesh, model, optimizer=optimizer), model, context_of(rank, mesh))

    return compare_resumed(trainer, make_mixture(name).example(4), Path(folder) / "checkpoint", False, True)


def resumed(rank: int, folder: str, before: bool, after: bool) -> float:
    """Train two steps, save, and train two more with and without divided sequences; compare with training on."""

    def trainer(divided: bool) -> Trainer:
        model = make_model("gpt2")
        optimizer = OptimizerSpec(name="adamw", learning_rate=0.01)
        plan = make_plan("tensor=2", model, sequence_parallel=divided, optimizer=optimizer)
        return Trainer(plan, model, context_of(rank, "tensor=2"))

    batch = make_model("gpt2").example(vocabulary_jobs.BATCH)
    return compare_resumed(trainer, batch, Path(folder) / "checkpoint", before, after)
