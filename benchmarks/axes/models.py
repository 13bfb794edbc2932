"""Tiny models of the grid, all with dropout, that compute their loss: of tokens, or of image classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stagewright.zoo.model import Batch, Model

VOCABULARY, LENGTH = 48, 16
DROPOUT = 0.2
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BLOCKS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
_DECODER = {
    **_TOKENS,
    **_BLOCKS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
    "attention_dropout": DROPOUT,
}
_ENCODER = {"hidden_dropout_prob": DROPOUT, "attention_probs_dropout_prob": DROPOUT}
_ROUTED = {"num_experts_per_tok": 2, "output_router_logits": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", _DECODER),
    "GPT-2": (
        "GPT2LMHeadModel",
        {
            **_TOKENS,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": LENGTH,
            "use_cache": False,
            "attn_pdrop": DROPOUT,
            "embd_pdrop": DROPOUT,
            "resid_pdrop": DROPOUT,
        },
    ),
    "BERT": ("BertForMaskedLM", {**_TOKENS, **_BLOCKS, **_ENCODER, "max_position_embeddings": LENGTH}),
    "ViT": ("ViTForImageClassification", {**_BLOCKS, **_ENCODER, "image_size": 16, "patch_size": 4, "num_labels": 5}),
    "Mixtral": ("MixtralForCausalLM", {**_DECODER, **_ROUTED, "num_local_experts": 4}),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", {**_DECODER, **_ROUTED, "num_experts": 8, "moe_intermediate_size": 8}),
    "T5": (
        "T5ForConditionalGeneration",
        {
            **_TOKENS,
            "d_model": 16,
            "d_kv": 4,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": DROPOUT,
            "use_cache": False,
            "decoder_start_token_id": 0,
        },
    ),
}
"""Class and configuration of each model."""


def make_model(name: str, batch_size: int) -> Model:
    """Build a model, always with the same weights, and a batch for it."""
    import transformers

    torch.manual_seed(0)
    class_name, config = MODELS[name]
    model_class: Any = getattr(transformers, class_name)
    module: nn.Module = model_class(model_class.config_class(**config))

    def make(count: int) -> Batch:
        generator = torch.Generator().manual_seed(count)
        if name == "ViT":
            labels = torch.randint(0, 5, (count,), generator=generator)
            return Batch(kwargs={"pixel_values": torch.randn(count, 3, 16, 16, generator=generator), "labels": labels})
        ids = torch.randint(3, VOCABULARY, (count, LENGTH), generator=generator)
        return Batch(kwargs={"input_ids": ids, "labels": ids.flip(1) if name == "T5" else ids})

    return Model(
        name=name,
        module=module,
        args=(),
        kwargs=make(batch_size).kwargs,
        loss=lambda output, target: output["loss"],
        batch_size=batch_size,
        make_example=make,
    )
