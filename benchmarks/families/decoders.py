"""Text decoders."""

from __future__ import annotations

from typing import Any

from families.family import VOCABULARY, Family, pretrained, tokens

__all__ = ["DECODERS"]

_BLOCKS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
_WITHOUT_GROUPS = {name: value for name, value in _BLOCKS.items() if name not in ("num_key_value_heads", "head_dim")}
_OLD: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}


def _decoder(name: str, class_name: str, *, padded: bool = False, **config: Any) -> Family:
    remark = "padded batch" if padded else ""
    return pretrained(name, "decoder", class_name, tokens(padded=padded), remark=remark, **config)


DECODERS: tuple[Family, ...] = (
    _decoder("gpt2", "GPT2LMHeadModel", **_OLD),
    _decoder("gpt2-padded", "GPT2LMHeadModel", padded=True, **_OLD),
    _decoder("gpt-bigcode", "GPTBigCodeForCausalLM", **_OLD),
    _decoder(
        "gpt-neo",
        "GPTNeoForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=8,
        max_position_embeddings=64,
        use_cache=False,
    ),
    _decoder("gpt-neox", "GPTNeoXForCausalLM", **_WITHOUT_GROUPS),
    _decoder("gptj", "GPTJForCausalLM", **_OLD, rotary_dim=4),
    _decoder("codegen", "CodeGenForCausalLM", **_OLD, rotary_dim=4),
    _decoder("ctrl", "CTRLLMHeadModel", **_OLD, dff=64),
    _decoder(
        "openai-gpt", "OpenAIGPTLMHeadModel", vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, n_positions=64
    ),
    _decoder(
        "opt",
        "OPTForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=16,
        use_cache=False,
    ),
    _decoder("bloom", "BloomForCausalLM", vocab_size=VOCABULARY, hidden_size=32, n_layer=4, n_head=4, use_cache=False),
    _decoder("llama", "LlamaForCausalLM", **_BLOCKS),
    _decoder("llama-padded", "LlamaForCausalLM", padded=True, **_BLOCKS),
    _decoder("mistral", "MistralForCausalLM", **_BLOCKS, sliding_window=8),
    _decoder("qwen2", "Qwen2ForCausalLM", **_BLOCKS),
    _decoder("qwen3", "Qwen3ForCausalLM", **_BLOCKS),
    _decoder("gemma", "GemmaForCausalLM", **_BLOCKS),
    _decoder("gemma2", "Gemma2ForCausalLM", **_BLOCKS, sliding_window=8, query_pre_attn_scalar=8),
    _decoder("gemma3", "Gemma3ForCausalLM", **_BLOCKS, sliding_window=8, query_pre_attn_scalar=8),
    _decoder("phi", "PhiForCausalLM", **_BLOCKS),
    _decoder("phi3", "Phi3ForCausalLM", **_BLOCKS),
    _decoder(
        "falcon",
        "FalconForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    ),
    _decoder(
        "mpt",
        "MptForCausalLM",
        vocab_size=VOCABULARY,
        d_model=32,
        n_layers=4,
        n_heads=4,
        max_seq_len=64,
        use_cache=False,
    ),
    _decoder("stablelm", "StableLmForCausalLM", **_BLOCKS),
    _decoder("starcoder2", "Starcoder2ForCausalLM", **_BLOCKS),
    _decoder("olmo", "OlmoForCausalLM", **_BLOCKS),
    _decoder("olmo2", "Olmo2ForCausalLM", **_BLOCKS),
    _decoder("olmo3", "Olmo3ForCausalLM", **_BLOCKS, sliding_window=8),
    _decoder("cohere", "CohereForCausalLM", **_BLOCKS),
    _decoder("cohere2", "Cohere2ForCausalLM", **_BLOCKS, sliding_window=8),
    _decoder("granite", "GraniteForCausalLM", **_BLOCKS),
    _decoder("persimmon", "PersimmonForCausalLM", **_WITHOUT_GROUPS),
    _decoder("nemotron", "NemotronForCausalLM", **_BLOCKS),
    _decoder("glm", "GlmForCausalLM", **_BLOCKS),
    _decoder("glm4", "Glm4ForCausalLM", **_BLOCKS),
    _decoder("smollm3", "SmolLM3ForCausalLM", **_BLOCKS),
    _decoder("helium", "HeliumForCausalLM", **_BLOCKS),
    _decoder("exaone4", "Exaone4ForCausalLM", **_BLOCKS, sliding_window=8),
    _decoder("diffllama", "DiffLlamaForCausalLM", **_BLOCKS),
    _decoder("biogpt", "BioGptForCausalLM", **_WITHOUT_GROUPS),
    _decoder(
        "xglm",
        "XGLMForCausalLM",
        vocab_size=VOCABULARY,
        d_model=32,
        ffn_dim=64,
        num_layers=4,
        attention_heads=4,
        max_position_embeddings=64,
        use_cache=False,
        layerdrop=0.0,
    ),
)
