"""torchvision's compiled operators in Python, where its build does not match the installed torch.

Its models need them for detection only; its Python code needs them to be defined.
"""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import torch

from libraries.region_align import align_regions

__all__ = ["define_missing_operators"]

_ROI = "Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width"
_BACKWARD = "int pooled_height, int pooled_width, int batch_size, int channels, int height, int width"
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align({_ROI}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward(Tensor grad, Tensor rois, float scale, {_BACKWARD}, int ratio, bool aligned) -> Tensor",
    f"qroi_align({_ROI}, int sampling_ratio, bool aligned) -> Tensor",
    f"ps_roi_align({_ROI}, int sampling_ratio) -> (Tensor, Tensor)",
    "_ps_roi_align_backward(Tensor grad) -> Tensor",
    f"roi_pool({_ROI}) -> (Tensor, Tensor)",
    "_roi_pool_backward(Tensor grad) -> Tensor",
    f"ps_roi_pool({_ROI}) -> (Tensor, Tensor)",
    "_ps_roi_pool_backward(Tensor grad) -> Tensor",
    "deform_conv2d(Tensor input, Tensor weight) -> Tensor",
    "_deform_conv2d_backward(Tensor grad) -> Tensor",
)
_libraries: list[torch.library.Library] = []


def define_missing_operators() -> None:
    """Define torchvision's operators, unless its compiled ones can be loaded."""
    if importlib.util.find_spec("torchvision") is None or _libraries:
        return
    try:
        import torchvision
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        _libraries.append(library)
        for schema in _SCHEMAS:
            library.define(schema)
        library.impl("nms", _nms, "CPU")
        library.impl("roi_align", align_regions, "CompositeImplicitAutograd")
        import torchvision
        import torchvision.extension

        torchvision.extension._has_ops = lambda: True
        # torchvision's would be compiled, and rounds differently after the first call under a dispatch mode.
        module = sys.modules["torchvision.ops.roi_align"]  # a function has its name in torchvision.ops
        module._roi_align = align_regions  # type: ignore[attr-defined]


def _nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Keep the boxes that overlap no box of a higher score by more than the threshold."""
    from torchvision.ops import box_iou

    order = scores.argsort(descending=True, stable=True).tolist()
    overlaps = (box_iou(boxes, boxes) > threshold).numpy()
    suppressed = np.zeros(len(order), dtype=bool)
    kept: list[int] = []
    for index in order:
        if not suppressed[index]:
            kept.append(index)
            suppressed |= overlaps[index]
    return torch.tensor(kept, dtype=torch.int64)
