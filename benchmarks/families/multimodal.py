"""Families with two kinds of input."""

from __future__ import annotations

from typing import Any

import torch

from families.family import VOCABULARY, Arguments, Family, pretrained

__all__ = ["MULTIMODAL"]

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "projection_dim": 16,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
_PICTURE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "projection_dim": 16,
}


def _picture_and_text(batch_size: int) -> Arguments:
    generator = torch.Generator().manual_seed(500 + batch_size)
    return (), {
        "input_ids": torch.randint(3, VOCABULARY, (batch_size, 10), generator=generator),
        "pixel_values": torch.randn(batch_size, 3, 32, 32, generator=generator),
    }


def _pair(name: str, class_name: str, **config: Any) -> Family:
    return pretrained(name, "multimodal", class_name, _picture_and_text, **config)


MULTIMODAL: tuple[Family, ...] = (
    _pair("clip", "CLIPModel", text_config=_TEXT, vision_config=_PICTURE, projection_dim=16),
    _pair("siglip", "SiglipModel", text_config=_TEXT | {"max_position_embeddings": 16}, vision_config=_PICTURE),
    _pair("chinese-clip", "ChineseCLIPModel", text_config=_TEXT, vision_config=_PICTURE, projection_dim=16),
    _pair(
        "altclip", "AltCLIPModel", text_config=_TEXT | {"project_dim": 16}, vision_config=_PICTURE, projection_dim=16
    ),
    _pair("blip", "BlipModel", text_config=_TEXT, vision_config=_PICTURE, projection_dim=16),
    _pair(
        "vilt",
        "ViltForImageAndTextRetrieval",
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        max_image_length=16,
    ),
)
