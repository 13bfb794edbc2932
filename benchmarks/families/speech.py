"""Speech and audio families, without SpecAugment and layer drop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from families.family import VOCABULARY, Arguments, Family, pretrained

__all__ = ["SPEECH"]

_WAVE: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 2, 2],
    "conv_kernel": [10, 3, 3],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}


def _sound(length: int = 800) -> Callable[[int], Arguments]:
    def example(batch_size: int) -> Arguments:
        generator = torch.Generator().manual_seed(300 + batch_size)
        return (), {"input_values": torch.randn(batch_size, length, generator=generator)}

    return example


def _features(name: str, *shape: int, decoder: bool = False) -> Callable[[int], Arguments]:
    def example(batch_size: int) -> Arguments:
        generator = torch.Generator().manual_seed(400 + batch_size)
        kwargs = {name: torch.randn(batch_size, *shape, generator=generator)}
        if decoder:
            kwargs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (batch_size, 6), generator=generator)
        return (), kwargs

    return example


SPEECH: tuple[Family, ...] = (
    pretrained("wav2vec2", "speech", "Wav2Vec2ForCTC", _sound(), **_WAVE),
    pretrained("hubert", "speech", "HubertForCTC", _sound(), **_WAVE),
    pretrained("wavlm", "speech", "WavLMForCTC", _sound(), **_WAVE, num_buckets=16, max_bucket_distance=32),
    pretrained("unispeech", "speech", "UniSpeechForCTC", _sound(), **_WAVE, num_ctc_classes=20),
    pretrained("unispeech-sat", "speech", "UniSpeechSatForCTC", _sound(), **_WAVE),
    pretrained("data2vec-audio", "speech", "Data2VecAudioForCTC", _sound(), **_WAVE, conv_pos_kernel_size=5),
    pretrained("wav2vec2-conformer", "speech", "Wav2Vec2ConformerForCTC", _sound(), **_WAVE),
    pretrained("sew", "speech", "SEWForCTC", _sound(), **_WAVE, squeeze_factor=2),
    pretrained(
        "whisper",
        "speech",
        "WhisperForConditionalGeneration",
        _features("input_features", 16, 60, decoder=True),
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=30,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        use_cache=False,
    ),
    pretrained(
        "speech-to-text",
        "speech",
        "Speech2TextForConditionalGeneration",
        _features("input_features", 40, 16, decoder=True),
        vocab_size=VOCABULARY,
        input_feat_per_channel=16,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        max_source_positions=64,
        max_target_positions=32,
        conv_channels=32,
        use_cache=False,
    ),
    pretrained(
        "audio-spectrogram-transformer",
        "speech",
        "ASTForAudioClassification",
        _features("input_values", 40, 16),
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        patch_size=4,
        frequency_stride=4,
        time_stride=4,
        max_length=40,
        num_mel_bins=16,
        num_labels=5,
    ),
    pretrained(
        "wav2vec2-bert",
        "speech",
        "Wav2Vec2BertForCTC",
        _features("input_features", 40, 16),
        vocab_size=20,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        feature_projection_input_dim=16,
        apply_spec_augment=False,
        layerdrop=0.0,
    ),
)
