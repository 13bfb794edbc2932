"""Models of torchvision: classification, segmentation, detection, video."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from families.family import Arguments, Family

__all__ = ["FAMILIES"]

CLASSIFICATION: dict[str, int] = {
    "alexnet": 64,
    "vgg11_bn": 32,
    "resnet18": 64,
    "resnet50": 64,
    "wide_resnet50_2": 32,
    "resnext50_32x4d": 64,
    "densenet121": 64,
    "googlenet": 64,
    "inception_v3": 299,
    "squeezenet1_1": 64,
    "mobilenet_v2": 64,
    "mobilenet_v3_small": 64,
    "shufflenet_v2_x0_5": 64,
    "mnasnet0_5": 64,
    "efficientnet_b0": 64,
    "efficientnet_v2_s": 64,
    "regnet_y_400mf": 64,
    "regnet_x_400mf": 64,
    "convnext_tiny": 64,
    "vit_b_16": 224,
    "swin_t": 64,
    "swin_v2_t": 64,
    "maxvit_t": 224,
}
SEGMENTATION = (
    "segmentation.fcn_resnet50",
    "segmentation.deeplabv3_resnet50",
    "segmentation.deeplabv3_mobilenet_v3_large",
    "segmentation.lraspp_mobilenet_v3_large",
)
VIDEO = ("video.r3d_18", "video.mc3_18", "video.r2plus1d_18")
_SMALL = {"min_size": 96, "max_size": 96}
_REGIONS = {
    **_SMALL,
    **{f"rpn_{when}_nms_top_n_{mode}": 20 for when in ("pre", "post") for mode in ("train", "test")},
    "box_detections_per_img": 5,
}
_DENSE = {**_SMALL, "topk_candidates": 20, "detections_per_img": 5}
DETECTION: dict[str, dict[str, int]] = {
    "detection.fasterrcnn_mobilenet_v3_large_320_fpn": _REGIONS,
    "detection.maskrcnn_resnet50_fpn": _REGIONS,
    "detection.keypointrcnn_resnet50_fpn": _REGIONS,
    "detection.retinanet_resnet50_fpn": _DENSE,
    "detection.fcos_resnet50_fpn": _DENSE,
    "detection.ssdlite320_mobilenet_v3_large": {},
}
"""Model → options for small images and few candidates."""


def _tensors(*shape: int) -> Callable[[int], Arguments]:
    def example(batch_size: int) -> Arguments:
        generator = torch.Generator().manual_seed(600 + batch_size)
        return (torch.randn(batch_size, *shape, generator=generator),), {}

    return example


def _detection(batch_size: int) -> Arguments:
    """Return a list of images with the boxes, classes, masks and key points of two objects in each."""
    generator = torch.Generator().manual_seed(600 + batch_size)
    images, targets = [], []
    for _ in range(batch_size):
        images.append(torch.rand(3, 96, 96, generator=generator))
        corners = torch.rand(2, 2, generator=generator) * 40
        boxes = torch.cat([corners, corners + 20 + torch.rand(2, 2, generator=generator) * 30], dim=1)
        masks = torch.randint(0, 2, (2, 96, 96), generator=generator, dtype=torch.uint8)
        keypoints = torch.cat([torch.rand(2, 17, 2, generator=generator) * 60, torch.ones(2, 17, 1)], dim=2)
        labels = torch.ones(2, dtype=torch.int64)
        targets.append({"boxes": boxes, "labels": labels, "masks": masks, "keypoints": keypoints})
    return (images, targets), {}


def _model(path: str, example: Callable[[int], Arguments], remark: str = "", **options: Any) -> Family:
    def make() -> nn.Module:
        import torchvision

        folder, _, name = path.rpartition(".")
        module = getattr(torchvision.models, folder) if folder else torchvision.models
        model: nn.Module = getattr(module, name)(weights=None, **options)
        return model

    name = "tv-" + path.rpartition(".")[2]
    return Family(name=name, group="torchvision", model_class=path, make=make, example=example, remark=remark)


FAMILIES: tuple[Family, ...] = ()
if importlib.util.find_spec("torchvision") is not None:
    FAMILIES = (
        *(
            _model(name, _tensors(3, size, size), num_classes=5, **({"init_weights": True} if "cept" in name else {}))
            for name, size in CLASSIFICATION.items()
        ),
        *(_model(name, _tensors(3, 64, 64), weights_backbone=None, num_classes=5) for name in SEGMENTATION),
        *(_model(name, _tensors(3, 4, 32, 32), num_classes=5) for name in VIDEO),
        *(_model(name, _detection, weights_backbone=None, **options) for name, options in DETECTION.items()),
    )
