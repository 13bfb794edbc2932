"""Models of diffusers: UNets, transformers, autoencoders and control networks, tiny and with random weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from families.family import Arguments, Family

__all__ = ["FAMILIES"]

Shapes = dict[str, Any]
"""For each keyword argument: the shape of one sample, the number of classes of an index, or a constant."""
_INDICES = ("timestep", "class_labels", "style")


def _example(shapes: Shapes) -> Callable[[int], Arguments]:
    def example(batch_size: int) -> Arguments:
        generator = torch.Generator().manual_seed(300 + batch_size)
        kwargs: dict[str, Any] = {}
        for name, shape in shapes.items():
            if "mask" in name and shape is not None:
                kwargs[name] = torch.ones(batch_size, *shape, dtype=torch.int64)
            elif name in _INDICES and isinstance(shape, int):
                kwargs[name] = torch.randint(0, shape, (batch_size,), generator=generator)
            elif name == "input_ids":
                kwargs[name] = torch.randint(0, shape, (batch_size, 4, 4), generator=generator)
            elif isinstance(shape, tuple):
                kwargs[name] = torch.randn(batch_size, *shape, generator=generator)
            elif isinstance(shape, dict):
                kwargs[name] = _example(shape)(batch_size)[1]
            else:
                kwargs[name] = shape
        return (), kwargs

    return example


def _model(name: str, class_name: str, shapes: Shapes, **config: Any) -> Family:
    def make() -> nn.Module:
        import diffusers

        model: nn.Module = getattr(diffusers, class_name)(**config)
        return model

    return Family(name=name, group="diffusers", model_class=class_name, make=make, example=_example(shapes))


_TIME = 1000
_BLOCKS: dict[str, Any] = {"layers_per_block": 1, "block_out_channels": (16, 32), "norm_num_groups": 8}
_TEXT = (6, 16)
_UNET: dict[str, Any] = {**_BLOCKS, "sample_size": 16, "in_channels": 4, "out_channels": 4}
_CONDITION: dict[str, Any] = {
    **_UNET,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
}
_IMAGE = (4, 16, 16)
_IDS = torch.zeros(16, 3)
_HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}

FAMILIES: tuple[Family, ...] = ()
if importlib.util.find_spec("diffusers") is not None:
    FAMILIES = (
        _model(
            "unet-2d",
            "UNet2DModel",
            {"sample": (3, 16, 16), "timestep": _TIME},
            **_BLOCKS,
            sample_size=16,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=8,
        ),
        _model(
            "unet-2d-condition",
            "UNet2DConditionModel",
            {"sample": _IMAGE, "timestep": _TIME, "encoder_hidden_states": _TEXT},
            **_CONDITION,
        ),
        _model(
            "unet-sdxl",
            "UNet2DConditionModel",
            {
                "sample": _IMAGE,
                "timestep": _TIME,
                "encoder_hidden_states": _TEXT,
                "added_cond_kwargs": {"text_embeds": (16,), "time_ids": (6,)},
            },
            **_CONDITION,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=64,
            transformer_layers_per_block=(1, 2),
        ),
        _model(
            "unet-1d",
            "UNet1DModel",
            {"sample": (2, 32), "timestep": _TIME},
            sample_size=32,
            block_out_channels=(16, 32),
            extra_in_channels=32,
            layers_per_block=1,
            down_block_types=("DownBlock1DNoSkip", "DownBlock1D"),
            up_block_types=("UpBlock1D", "UpBlock1DNoSkip"),
        ),
        _model(
            "unet-3d-condition",
            "UNet3DConditionModel",
            {"sample": (4, 3, 16, 16), "timestep": _TIME, "encoder_hidden_states": _TEXT},
            **_UNET,
            down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
            cross_attention_dim=16,
            attention_head_dim=4,
        ),
        _model(
            "controlnet",
            "ControlNetModel",
            {"sample": _IMAGE, "timestep": _TIME, "encoder_hidden_states": _TEXT, "controlnet_cond": (3, 32, 32)},
            in_channels=4,
            block_out_channels=(16, 32),
            layers_per_block=1,
            norm_num_groups=8,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            cross_attention_dim=16,
            attention_head_dim=4,
            conditioning_embedding_out_channels=(8, 16),
        ),
        _model(
            "dit",
            "DiTTransformer2DModel",
            {"hidden_states": (4, 8, 8), "timestep": _TIME, "class_labels": 10},
            **_HEADS,
            in_channels=4,
            sample_size=8,
            norm_num_groups=4,
            num_embeds_ada_norm=1000,
        ),
        _model(
            "transformer-2d",
            "Transformer2DModel",
            {"hidden_states": (16, 8, 8), "encoder_hidden_states": _TEXT},
            **_HEADS,
            in_channels=16,
            norm_num_groups=4,
            cross_attention_dim=16,
        ),
        _model(
            "pixart",
            "PixArtTransformer2DModel",
            {
                "hidden_states": (4, 8, 8),
                "encoder_hidden_states": _TEXT,
                "timestep": _TIME,
                "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
            },
            **_HEADS,
            in_channels=4,
            out_channels=8,
            sample_size=8,
            cross_attention_dim=16,
            caption_channels=16,
            norm_num_groups=1,
        ),
        _model(
            "prior",
            "PriorTransformer",
            {"hidden_states": (8,), "timestep": _TIME, "proj_embedding": (8,), "encoder_hidden_states": (6, 8)},
            **_HEADS,
            embedding_dim=8,
            num_embeddings=6,
            additional_embeddings=4,
        ),
        _model(
            "sd3",
            "SD3Transformer2DModel",
            {
                "hidden_states": (4, 8, 8),
                "encoder_hidden_states": _TEXT,
                "pooled_projections": (16,),
                "timestep": _TIME,
            },
            **_HEADS,
            in_channels=4,
            out_channels=4,
            sample_size=8,
            patch_size=2,
            joint_attention_dim=16,
            caption_projection_dim=16,
            pooled_projection_dim=16,
            pos_embed_max_size=8,
        ),
        _model(
            "flux",
            "FluxTransformer2DModel",
            {
                "hidden_states": (16, 4),
                "encoder_hidden_states": _TEXT,
                "pooled_projections": (16,),
                "timestep": _TIME,
                "img_ids": _IDS,
                "txt_ids": torch.zeros(6, 3),
            },
            **{**_HEADS, "num_layers": 1},
            num_single_layers=2,
            in_channels=4,
            patch_size=1,
            joint_attention_dim=16,
            pooled_projection_dim=16,
            axes_dims_rope=(2, 2, 4),
        ),
        _model(
            "chroma",
            "ChromaTransformer2DModel",
            {
                "hidden_states": (16, 4),
                "encoder_hidden_states": _TEXT,
                "timestep": _TIME,
                "img_ids": _IDS,
                "txt_ids": torch.zeros(6, 3),
            },
            **{**_HEADS, "num_layers": 1},
            num_single_layers=1,
            in_channels=4,
            patch_size=1,
            joint_attention_dim=16,
            axes_dims_rope=(2, 2, 4),
            approximator_num_channels=8,
            approximator_hidden_dim=16,
            approximator_layers=1,
        ),
        _model(
            "aura-flow",
            "AuraFlowTransformer2DModel",
            {"hidden_states": (4, 8, 8), "encoder_hidden_states": _TEXT, "timestep": _TIME},
            num_attention_heads=2,
            attention_head_dim=8,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            in_channels=4,
            out_channels=4,
            sample_size=8,
            patch_size=2,
            joint_attention_dim=16,
            caption_projection_dim=16,
            pos_embed_max_size=16,
        ),
        _model(
            "hunyuan-dit",
            "HunyuanDiT2DModel",
            {
                "hidden_states": (4, 8, 8),
                "timestep": (),
                "encoder_hidden_states": (6, 16),
                "text_embedding_mask": (6,),
                "encoder_hidden_states_t5": (6, 16),
                "text_embedding_mask_t5": (6,),
                "image_meta_size": (6,),
                "style": 1,
                "image_rotary_emb": None,
            },
            **_HEADS,
            in_channels=4,
            sample_size=8,
            patch_size=2,
            hidden_size=16,
            mlp_ratio=2.0,
            cross_attention_dim=16,
            cross_attention_dim_t5=16,
            pooled_projection_dim=16,
            text_len=6,
            text_len_t5=6,
            activation_fn="gelu-approximate",
        ),
        _model(
            "sana",
            "SanaTransformer2DModel",
            {"hidden_states": (4, 8, 8), "encoder_hidden_states": _TEXT, "timestep": _TIME},
            **_HEADS,
            in_channels=4,
            out_channels=4,
            num_cross_attention_heads=2,
            cross_attention_head_dim=8,
            cross_attention_dim=16,
            caption_channels=16,
            sample_size=8,
            patch_size=1,
        ),
        _model(
            "cogvideox",
            "CogVideoXTransformer3DModel",
            {"hidden_states": (2, 4, 8, 8), "encoder_hidden_states": _TEXT, "timestep": _TIME},
            **_HEADS,
            in_channels=4,
            out_channels=4,
            time_embed_dim=8,
            text_embed_dim=16,
            sample_width=8,
            sample_height=8,
            sample_frames=5,
            patch_size=2,
            temporal_compression_ratio=4,
            max_text_seq_length=6,
        ),
        _model(
            "latte",
            "LatteTransformer3DModel",
            {"hidden_states": (4, 2, 8, 8), "encoder_hidden_states": _TEXT, "timestep": _TIME},
            **_HEADS,
            in_channels=4,
            out_channels=8,
            sample_size=8,
            patch_size=2,
            video_length=2,
            caption_channels=16,
            cross_attention_dim=16,
            norm_type="ada_norm_single",
            num_embeds_ada_norm=1000,
        ),
        _model(
            "wan",
            "WanTransformer3DModel",
            {"hidden_states": (4, 2, 8, 8), "encoder_hidden_states": _TEXT, "timestep": _TIME},
            **_HEADS,
            in_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=16,
            ffn_dim=32,
            patch_size=(1, 2, 2),
            cross_attn_norm=True,
            rope_max_seq_len=16,
        ),
        _model(
            "ltx-video",
            "LTXVideoTransformer3DModel",
            {
                "hidden_states": (16, 4),
                "encoder_hidden_states": _TEXT,
                "timestep": _TIME,
                "encoder_attention_mask": None,
                "num_frames": 1,
                "height": 4,
                "width": 4,
            },
            **_HEADS,
            in_channels=4,
            out_channels=4,
            cross_attention_dim=16,
            caption_channels=16,
        ),
        _model(
            "mochi",
            "MochiTransformer3DModel",
            {
                "hidden_states": (4, 2, 8, 8),
                "encoder_hidden_states": _TEXT,
                "timestep": _TIME,
                "encoder_attention_mask": (6,),
            },
            **_HEADS,
            in_channels=4,
            out_channels=4,
            pooled_projection_dim=8,
            text_embed_dim=16,
            time_embed_dim=4,
            max_sequence_length=6,
        ),
        _model(
            "lumina",
            "Lumina2Transformer2DModel",
            {
                "hidden_states": (4, 8, 8),
                "encoder_hidden_states": _TEXT,
                "timestep": _TIME,
                "encoder_attention_mask": (6,),
            },
            in_channels=4,
            sample_size=8,
            hidden_size=24,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=2,
            num_kv_heads=1,
            axes_dim_rope=(4, 4, 4),
            axes_lens=(16, 16, 16),
            cap_feat_dim=16,
        ),
        _model(
            "stable-audio",
            "StableAudioDiTModel",
            {
                "hidden_states": (4, 8),
                "timestep": _TIME,
                "encoder_hidden_states": (6, 8),
                "global_hidden_states": (1, 16),
                "rotary_embedding": None,
            },
            sample_size=8,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            num_key_value_attention_heads=2,
            cross_attention_dim=8,
            time_proj_dim=8,
            global_states_input_dim=16,
            cross_attention_input_dim=8,
        ),
        _model(
            "autoencoder-kl",
            "AutoencoderKL",
            {"sample": (3, 16, 16)},
            **_BLOCKS,
            in_channels=3,
            out_channels=3,
            down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
            up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
            latent_channels=4,
        ),
        _model(
            "autoencoder-tiny",
            "AutoencoderTiny",
            {"sample": (3, 16, 16)},
            encoder_block_out_channels=(16, 16),
            decoder_block_out_channels=(16, 16),
            num_encoder_blocks=(1, 2),
            num_decoder_blocks=(2, 1),
        ),
        _model(
            "vq-model",
            "VQModel",
            {"sample": (3, 16, 16)},
            **_BLOCKS,
            down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
            up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
            latent_channels=4,
            num_vq_embeddings=16,
        ),
        _model(
            "autoencoder-temporal",
            "AutoencoderKLTemporalDecoder",
            {"sample": (3, 16, 16), "num_frames": 1},
            in_channels=3,
            out_channels=3,
            block_out_channels=(32, 32),
            layers_per_block=1,
            down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
            latent_channels=4,
        ),
        _model(
            "uvit",
            "UVit2DModel",
            {"input_ids": 28, "encoder_hidden_states": _TEXT, "pooled_text_emb": (16,), "micro_conds": (5,)},
            hidden_size=32,
            cond_embed_dim=16,
            encoder_hidden_size=16,
            micro_cond_encode_dim=4,
            micro_cond_embed_dim=20,
            vocab_size=32,
            codebook_size=28,
            in_channels=32,
            block_out_channels=32,
            num_res_blocks=1,
            num_hidden_layers=2,
            num_attention_heads=2,
            block_num_heads=2,
            intermediate_size=64,
        ),
    )
