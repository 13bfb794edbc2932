"""Configurations of x-transformers."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from families.family import Arguments, Family

__all__ = ["FAMILIES"]

TOKENS, VOCABULARY = 12, 64


def _tokens(batch_size: int) -> Arguments:
    generator = torch.Generator().manual_seed(400 + batch_size)
    return (torch.randint(0, VOCABULARY, (batch_size, TOKENS), generator=generator),), {}


def _images(batch_size: int) -> Arguments:
    generator = torch.Generator().manual_seed(400 + batch_size)
    return (torch.randn(batch_size, 3, 16, 16, generator=generator),), {}


def _floats(batch_size: int) -> Arguments:
    generator = torch.Generator().manual_seed(400 + batch_size)
    return (torch.randn(batch_size, TOKENS, 16, generator=generator),), {}


def _pair(batch_size: int) -> Arguments:
    return (*_tokens(batch_size)[0], *_tokens(batch_size + 1)[0][0][:batch_size].flip(1).unsqueeze(0)), {}


def _text(name: str, layers: str = "Decoder", *, options: dict[str, Any] | None = None, **config: Any) -> Family:
    def make() -> nn.Module:
        import x_transformers

        attention = getattr(x_transformers, layers)(**{"dim": 32, "depth": 4, "heads": 4, "attn_dim_head": 8} | config)
        model: nn.Module = x_transformers.TransformerWrapper(
            num_tokens=VOCABULARY, max_seq_len=TOKENS, attn_layers=attention, **(options or {})
        )
        return model

    return Family(name=name, group="x-transformers", model_class="TransformerWrapper", make=make, example=_tokens)


def _vision() -> nn.Module:
    import x_transformers

    encoder = x_transformers.Encoder(dim=32, depth=3, heads=4, attn_dim_head=8)
    model: nn.Module = x_transformers.ViTransformerWrapper(
        image_size=16, patch_size=4, num_classes=5, attn_layers=encoder
    )
    return model


def _continuous() -> nn.Module:
    import x_transformers

    decoder = x_transformers.Decoder(dim=32, depth=3, heads=4, attn_dim_head=8)
    model: nn.Module = x_transformers.ContinuousTransformerWrapper(
        dim_in=16, dim_out=8, max_seq_len=TOKENS, attn_layers=decoder
    )
    return model


def _encoder_decoder() -> nn.Module:
    import x_transformers

    sizes = {"num_tokens": VOCABULARY, "depth": 2, "heads": 4, "max_seq_len": TOKENS, "attn_dim_head": 8}
    both = {f"{side}_{name}": value for side in ("enc", "dec") for name, value in sizes.items()}
    model: nn.Module = x_transformers.XTransformer(dim=32, **both)
    return model


FAMILIES: tuple[Family, ...] = ()
if importlib.util.find_spec("x_transformers") is not None:
    FAMILIES = (
        _text("x-decoder"),
        _text("x-encoder", "Encoder"),
        _text("x-rotary", rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True, ff_swish=True),
        _text("x-alibi", alibi_pos_bias=True, alibi_num_heads=2),
        _text("x-relative-position", "Encoder", rel_pos_bias=True),
        _text("x-sandwich", "Encoder", depth=6, sandwich_coef=2),
        _text("x-memory-tokens", options={"num_memory_tokens": 2}),
        _text("x-one-kv-head", attn_one_kv_head=True, attn_qk_norm=True),
        _text("x-residual-attention", residual_attn=True),
        _text("x-macaron", macaron=True),
        _text("x-dropout", attn_dropout=0.1, ff_dropout=0.1),
        _text("x-hyper-connections", num_residual_streams=2),
        Family(name="x-vit", group="x-transformers", model_class="ViTransformerWrapper", make=_vision, example=_images),
        Family(
            name="x-continuous",
            group="x-transformers",
            model_class="ContinuousTransformerWrapper",
            make=_continuous,
            example=_floats,
        ),
        Family(
            name="x-encoder-decoder",
            group="x-transformers",
            model_class="XTransformer",
            make=_encoder_decoder,
            example=_pair,
        ),
    )
