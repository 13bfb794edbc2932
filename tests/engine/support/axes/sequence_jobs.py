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

_MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "router_jitter_noise": 0.1}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 8, "mlp_only_layers": [1]}),
    "qwen2-moe": ("Qwen2Moe", {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}),
    "olmoe": ("Olmoe", {"num_experts": 4}),
    "closed-mixtral": ("Mixtral", {"num_local_experts": 4, "output_router_logits": False}),
}
"""Layers are captured as several units where the model collects their router logits."""


def make_mixture(name: str) -> Model:
    """Build a tiny mixture of experts with dropout in attention, and a batch of 9 tokens a sample."""
    import transformers as hf

    torch.manual_seed(0)
    kind, more = _MIXTURES[name]
    config = getattr(hf, f"{kind}Config")(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=16, max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        use_cache=False, attention_dropout=0.2, num_experts_per_tok=2, **{"output_router_logits": True, **more},
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


def resumed(rank: int, folder: str, before: bool, after: bool) -> float:
    """Train two steps, save, and train two more with and without divided sequences; compare with training on."""

    def trainer(divided: bool) -> Trainer:
        model = make_model("gpt2")
        optimizer = OptimizerSpec(name="adamw", learning_rate=0.01)
        plan = make_plan("tensor=2", model, sequence_parallel=divided, optimizer=optimizer)
        return Trainer(plan, model, context_of(rank, "tensor=2"))

    batch = make_model("gpt2").example(vocabulary_jobs.BATCH)
    return compare_resumed(trainer, batch, Path(folder) / "checkpoint", before, after)
