"""Architectures of timm at their smallest, on small images, with random weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from families.family import Arguments, Family

__all__ = ["FAMILIES"]

ARCHITECTURES: dict[str, int] = {
    "resnet10t": 64,
    "resnet18": 64,
    "resnetv2_18": 64,
    "seresnet18": 64,
    "skresnet18": 64,
    "ecaresnet26t": 64,
    "resnest14d": 64,
    "resnext26ts": 64,
    "res2net50_14w_8s": 64,
    "gcresnext26ts": 64,
    "botnet26t_256": 256,
    "halonet26t": 256,
    "lambda_resnet26rpt_256": 256,
    "densenet121": 64,
    "dla34": 64,
    "dpn48b": 64,
    "vovnet39a": 64,
    "selecsls42": 64,
    "hrnet_w18_small": 64,
    "efficientnet_b0": 64,
    "tf_efficientnetv2_b0": 64,
    "efficientnet_lite0": 64,
    "mixnet_s": 64,
    "mnasnet_small": 64,
    "mobilenetv2_035": 64,
    "mobilenetv3_small_050": 64,
    "mobilenetv4_conv_small": 64,
    "mobileone_s0": 64,
    "fbnetc_100": 64,
    "ghostnet_050": 64,
    "lcnet_050": 64,
    "tinynet_e": 64,
    "rexnetr_200": 64,
    "hardcorenas_a": 64,
    "spnasnet_100": 64,
    "regnetx_002": 64,
    "regnety_002": 64,
    "repvgg_a0": 64,
    "repghostnet_050": 64,
    "vgg11": 64,
    "xception41": 64,
    "inception_v3": 96,
    "nf_resnet26": 64,
    "nfnet_l0": 64,
    "cspresnet50": 64,
    "cs3darknet_s": 64,
    "convnext_atto": 64,
    "convnextv2_atto": 64,
    "convmixer_768_32": 32,
    "inception_next_atto": 64,
    "hgnet_tiny": 64,
    "hgnetv2_b0": 64,
    "starnet_s1": 64,
    "vit_tiny_patch16_224": 224,
    "deit_tiny_distilled_patch16_224": 224,
    "deit3_small_patch16_224": 224,
    "cait_xxs24_224": 224,
    "crossvit_tiny_240": 240,
    "convit_tiny": 224,
    "xcit_nano_12_p16_224": 224,
    "beit_base_patch16_224": 224,
    "eva02_tiny_patch14_224": 224,
    "swin_tiny_patch4_window7_224": 224,
    "swinv2_cr_tiny_224": 224,
    "pit_ti_224": 224,
    "poolformer_s12": 64,
    "pvt_v2_b0": 64,
    "twins_svt_small": 224,
    "mobilevit_xxs": 64,
    "mobilevitv2_050": 64,
    "edgenext_xx_small": 64,
    "efficientformer_l1": 224,
    "efficientformerv2_s0": 224,
    "efficientvit_b0": 64,
    "fastvit_t8": 64,
    "focalnet_tiny_srf": 64,
    "gcvit_xxtiny": 224,
    "levit_128s": 224,
    "maxvit_rmlp_pico_rw_256": 256,
    "coat_lite_tiny": 224,
    "coatnet_nano_rw_224": 224,
    "davit_tiny": 64,
    "mvitv2_tiny": 64,
    "nest_tiny": 224,
    "tnt_s_patch16_224": 224,
    "visformer_tiny": 224,
    "volo_d1_224": 224,
    "mixer_s32_224": 224,
    "resmlp_12_224": 224,
    "gmlp_ti16_224": 224,
    "sequencer2d_s": 64,
    "repvit_m0_9": 64,
    "tiny_vit_5m_224": 224,
    "hiera_tiny_224": 224,
    "rdnet_tiny": 64,
}
"""Architecture → size of the images."""


def _images(size: int) -> Callable[[int], Arguments]:
    def example(batch_size: int) -> Arguments:
        generator = torch.Generator().manual_seed(500 + batch_size)
        return (torch.randn(batch_size, 3, size, size, generator=generator),), {}

    return example


def _model(name: str, size: int) -> Family:
    def make() -> nn.Module:
        import timm

        options: dict[str, Any] = {"num_classes": 5}
        model: nn.Module = timm.create_model(name, pretrained=False, **options)
        return model

    return Family(name=f"timm-{name}", group="timm", model_class=name, make=make, example=_images(size))


FAMILIES: tuple[Family, ...] = ()
if importlib.util.find_spec("timm") is not None:
    FAMILIES = tuple(_model(name, size) for name, size in ARCHITECTURES.items())
