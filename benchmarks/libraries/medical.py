"""Networks of MONAI."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from families.family import Arguments, Family

__all__ = ["FAMILIES"]


def _volume(*shape: int) -> Callable[[int], Arguments]:
    def example(batch_size: int) -> Arguments:
        generator = torch.Generator().manual_seed(700 + batch_size)
        return (torch.randn(batch_size, *shape, generator=generator),), {}

    return example


def _model(class_name: str, *shape: int, **config: Any) -> Family:
    def make() -> nn.Module:
        import monai.networks.nets

        model: nn.Module = getattr(monai.networks.nets, class_name)(**config)
        return model

    name = f"monai-{class_name.lower()}"
    return Family(name=name, group="MONAI", model_class=class_name, make=make, example=_volume(*shape))


_2D = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}

FAMILIES: tuple[Family, ...] = ()
if importlib.util.find_spec("monai") is not None:
    FAMILIES = (
        _model("UNet", 1, 32, 32, **_2D, channels=(8, 16, 32), strides=(2, 2), num_res_units=1),
        _model("BasicUNet", 1, 32, 32, **_2D, features=(8, 8, 16, 16, 32, 8)),
        _model("BasicUNetPlusPlus", 1, 32, 32, **_2D, features=(8, 8, 16, 16, 32, 8)),
        _model("AttentionUnet", 1, 32, 32, **_2D, channels=(8, 16, 32), strides=(2, 2)),
        _model("DynUNet", 1, 32, 32, **_2D, kernel_size=[3] * 3, strides=[1, 2, 2], upsample_kernel_size=[2, 2]),
        _model("SegResNet", 1, 32, 32, **_2D, init_filters=8, blocks_down=(1, 1, 1), blocks_up=(1, 1)),
        _model("SegResNetDS", 1, 32, 32, **_2D, init_filters=8, blocks_down=(1, 1, 1)),
        _model("VNet", 1, 16, 16, 16, spatial_dims=3, in_channels=1, out_channels=2),
        _model("HighResNet", 1, 16, 16, **_2D),
        _model("DenseNet121", 1, 32, 32, **_2D),
        _model("SEResNet50", 1, 64, 64, spatial_dims=2, in_channels=1, num_classes=2),
        _model(
            "EfficientNetBN",
            1,
            64,
            64,
            model_name="efficientnet-b0",
            spatial_dims=2,
            in_channels=1,
            num_classes=2,
            pretrained=False,
        ),
        _model(
            "ResNet",
            1,
            32,
            32,
            block="basic",
            layers=[1, 1, 1, 1],
            block_inplanes=[8, 16, 16, 32],
            spatial_dims=2,
            n_input_channels=1,
            num_classes=2,
        ),
        _model(
            "ViT",
            1,
            32,
            32,
            in_channels=1,
            img_size=(32, 32),
            patch_size=(8, 8),
            hidden_size=32,
            mlp_dim=64,
            num_layers=3,
            num_heads=4,
            spatial_dims=2,
            classification=True,
        ),
        _model(
            "ViTAutoEnc",
            1,
            32,
            32,
            in_channels=1,
            img_size=(32, 32),
            patch_size=(4, 4),
            hidden_size=32,
            mlp_dim=64,
            num_layers=3,
            num_heads=4,
            spatial_dims=2,
        ),
        _model(
            "UNETR",
            1,
            32,
            32,
            in_channels=1,
            out_channels=2,
            img_size=(32, 32),
            feature_size=8,
            hidden_size=32,
            mlp_dim=64,
            num_heads=4,
            spatial_dims=2,
        ),
        _model("SwinUNETR", 1, 64, 64, in_channels=1, out_channels=2, feature_size=12, spatial_dims=2),
        _model("FlexibleUNet", 1, 64, 64, in_channels=1, out_channels=2, backbone="efficientnet-b0", spatial_dims=2),
        _model("AutoEncoder", 1, 32, 32, **_2D, channels=(8, 16), strides=(2, 2)),
        _model("Regressor", 1, 32, 32, in_shape=(1, 32, 32), out_shape=(2,), channels=(8, 16), strides=(2, 2)),
    )
