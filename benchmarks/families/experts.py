"""Mixture-of-experts models: data-dependent routing inside a unit."""

from __future__ import annotations

from typing import Any

from families.family import VOCABULARY, Family, pretrained, tokens

__all__ = ["EXPERTS"]

_BLOCKS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}


def _experts(name: str, class_name: str, remark: str = "", **config: Any) -> Family:
    return pretrained(name, "mixture of experts", class_name, tokens(), remark=remark, **(_BLOCKS | config))


EXPERTS: tuple[Family, ...] = (
    _experts("mixtral", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2),
    _experts(
        "qwen2-moe",
        "Qwen2MoeForCausalLM",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=32,
    ),
    _experts(
        "qwen3-moe", "Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
    ),
    _experts(
        "qwen3-moe-balanced",
        "Qwen3MoeForCausalLM",
        remark="with router logits and the loss that balances the experts",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        head_dim=8,
        output_router_logits=True,
    ),
    _experts("olmoe", "OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2),
    _experts("granitemoe", "GraniteMoeForCausalLM", num_local_experts=4, num_experts_per_tok=2),
    _experts("phimoe", "PhimoeForCausalLM", num_local_experts=4, num_experts_per_tok=2),
    _experts("gpt-oss", "GptOssForCausalLM", num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=8),
    _experts(
        "deepseek-v2",
        "DeepseekV2ForCausalLM",
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    ),
    _experts(
        "deepseek-v3",
        "DeepseekV3ForCausalLM",
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    ),
    pretrained(
        "switch-transformers",
        "mixture of experts",
        "SwitchTransformersForConditionalGeneration",
        tokens(decoder=True),
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_heads=4,
        num_experts=4,
        use_cache=False,
    ),
    pretrained(
        "nllb-moe",
        "mixture of experts",
        "NllbMoeForConditionalGeneration",
        tokens(decoder=True),
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        num_experts=4,
        expert_capacity=16,
        max_position_embeddings=64,
        use_cache=False,
    ),
)
