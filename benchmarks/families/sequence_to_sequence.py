"""Encoder-decoder families."""

from __future__ import annotations

from typing import Any

from families.family import VOCABULARY, Family, pretrained, tokens

__all__ = ["SEQUENCE_TO_SEQUENCE"]

_BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "use_cache": False,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "use_cache": False,
}


def _pair(name: str, class_name: str, *, padded: bool = False, length: int = 12, **config: Any) -> Family:
    remark = "padded batch" if padded else ""
    example = tokens(length, padded=padded, decoder=True)
    return pretrained(name, "encoder-decoder", class_name, example, remark=remark, **config)


SEQUENCE_TO_SEQUENCE: tuple[Family, ...] = (
    _pair("t5", "T5ForConditionalGeneration", **_T5),
    _pair("t5-padded", "T5ForConditionalGeneration", padded=True, **_T5),
    _pair("t5-gated", "T5ForConditionalGeneration", **_T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    _pair("mt5", "MT5ForConditionalGeneration", **_T5),
    _pair("umt5", "UMT5ForConditionalGeneration", **_T5),
    _pair("bart", "BartForConditionalGeneration", **_BART),
    _pair("mbart", "MBartForConditionalGeneration", **_BART),
    _pair("pegasus", "PegasusForConditionalGeneration", **_BART),
    _pair("marian", "MarianMTModel", padded=True, **_BART),
    _pair("blenderbot", "BlenderbotForConditionalGeneration", **_BART),
    _pair("blenderbot-small", "BlenderbotSmallForConditionalGeneration", **_BART),
    _pair("m2m100", "M2M100ForConditionalGeneration", **_BART),
    _pair("plbart", "PLBartForConditionalGeneration", **_BART),
    _pair("mvp", "MvpForConditionalGeneration", **_BART),
    _pair("longt5", "LongT5ForConditionalGeneration", length=16, **_T5, local_radius=4),
    _pair(
        "led",
        "LEDForConditionalGeneration",
        length=16,
        **{name: value for name, value in _BART.items() if name != "max_position_embeddings"},
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
        attention_window=8,
    ),
    _pair(
        "prophetnet",
        "ProphetNetForConditionalGeneration",
        vocab_size=VOCABULARY,
        hidden_size=32,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        max_position_embeddings=64,
        disable_ngram_loss=True,
        use_cache=False,
    ),
)
