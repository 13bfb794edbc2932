"""torchvision's detectors with lists of samples, as plan models: ``libraries.detectors:retinanet_resnet50_fpn``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from libraries.operators import define_missing_operators
from libraries.torchvision_models import DETECTION, FAMILIES

SAMPLES = 9


def __getattr__(name: str) -> Callable[[], Any]:
    family = next((family for family in FAMILIES if family.name == f"tv-{name}"), None)
    if family is None or f"detection.{name}" not in DETECTION:
        raise AttributeError(name)

    def make() -> Any:
        define_missing_operators()
        torch.manual_seed(0)
        return family.make(), samples(SAMPLES)

    return make


def samples(count: int) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Return images of several sizes, each with the boxes, classes, masks and key points of one to three objects."""
    generator = torch.Generator().manual_seed(600 + count)
    images, targets = [], []
    for index in range(count):
        height, width, num = 80 + 8 * (index % 3), 96 - 8 * (index % 2), 1 + index % 3
        images.append(torch.rand(3, height, width, generator=generator))
        corners = torch.rand(num, 2, generator=generator) * 30
        sizes = 20 + torch.rand(num, 2, generator=generator) * 25
        masks = torch.randint(0, 2, (num, height, width), generator=generator, dtype=torch.uint8)
        keypoints = torch.cat([torch.rand(num, 17, 2, generator=generator) * 60, torch.ones(num, 17, 1)], dim=2)
        labels = torch.ones(num, dtype=torch.int64)
        boxes = torch.cat([corners, corners + sizes], dim=1)
        targets.append({"boxes": boxes, "labels": labels, "masks": masks, "keypoints": keypoints})
    return images, targets
