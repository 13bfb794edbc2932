"""State-space and recurrent families, and hybrids with attention."""

from __future__ import annotations

from typing import Any

from families.family import VOCABULARY, Family, pretrained, tokens

__all__ = ["STATE_SPACE"]


def _state_space(name: str, class_name: str, **config: Any) -> Family:
    return pretrained(
        name, "state space", class_name, tokens(), vocab_size=VOCABULARY, hidden_size=32, use_cache=False, **config
    )


STATE_SPACE: tuple[Family, ...] = (
    _state_space("mamba", "MambaForCausalLM", num_hidden_layers=3, state_size=4),
    _state_space(
        "mamba2",
        "Mamba2ForCausalLM",
        num_hidden_layers=3,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=4,
    ),
    _state_space("falcon-mamba", "FalconMambaForCausalLM", num_hidden_layers=3, state_size=4),
    _state_space("rwkv", "RwkvForCausalLM", num_hidden_layers=3, context_length=64),
    _state_space(
        "jamba",
        "JambaForCausalLM",
        num_hidden_layers=4,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        mamba_d_state=4,
        use_mamba_kernels=False,
    ),
    _state_space(
        "bamba",
        "BambaForCausalLM",
        num_hidden_layers=3,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=2,
        mamba_chunk_size=4,
    ),
    _state_space(
        "recurrent-gemma",
        "RecurrentGemmaForCausalLM",
        num_hidden_layers=3,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        lru_width=32,
        attention_window_size=8,
    ),
    _state_space(
        "lfm2",
        "Lfm2ForCausalLM",
        num_hidden_layers=3,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        full_attn_idxs=[1],
        block_auto_adjust_ff_dim=False,
    ),
    _state_space(
        "qwen3-next",
        "Qwen3NextForCausalLM",
        num_hidden_layers=4,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    _state_space("xlstm", "xLSTMForCausalLM", num_hidden_layers=2, num_heads=4, chunk_size=4, mode="train"),
)
