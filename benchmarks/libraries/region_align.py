"""torchvision's ``roi_align`` as matrix products, fast for small feature maps.

    y [K, PH, H]   weights of the map's rows for each row of bins      ┐  bins = y · map · xᵀ, for each region
    x [K, PW, W]   weights of the map's columns for each column        ┘

torchvision's own Python version gathers four values for each sampling point of each channel: for Mask R-CNN that is
most of a step, and minutes in each run of the parity check.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["align_regions"]


def align_regions(
    features: torch.Tensor,
    regions: torch.Tensor,
    scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> torch.Tensor:
    """Average ``sampling_ratio``² bilinear samples in each bin of each region; the boxes get no gradient.

    ``regions``: for each, the index of its image and two corners. Without a ratio, samples are at most a pixel apart.
    """
    corners = regions.detach()[:, 1:].to(features.dtype) * scale - (0.5 if aligned else 0.0)
    options: dict[str, Any] = {"ratio": sampling_ratio, "is_aligned": aligned}
    columns = _weights(corners[:, 0], corners[:, 2], pooled_width, features.shape[3], **options)
    rows = _weights(corners[:, 1], corners[:, 3], pooled_height, features.shape[2], **options)
    images = regions[:, 0].to(torch.int64)
    aligned_regions = features.new_zeros(len(regions), features.shape[1], pooled_height, pooled_width)
    for index, image in enumerate(features):
        (own,) = torch.where(images == index)
        sampled_rows = torch.einsum("kph,chw->kcpw", rows[own], image)
        aligned_regions = aligned_regions.index_copy(0, own, torch.einsum("kcpw,kqw->kcpq", sampled_rows, columns[own]))
    return aligned_regions


def _weights(
    start: torch.Tensor, end: torch.Tensor, num_bins: int, size: int, *, ratio: int, is_aligned: bool
) -> torch.Tensor:
    """Return the weight of each of a map's ``size`` rows in each bin of each region: ``[K, num_bins, size]``."""
    length = (end - start if is_aligned else (end - start).clamp(min=1.0)) / num_bins
    counts = torch.full_like(length, ratio) if ratio > 0 else length.ceil()
    samples = torch.arange(int(max(counts.tolist(), default=0)), dtype=start.dtype)
    bins = start[:, None] + torch.arange(num_bins, dtype=start.dtype) * length[:, None]
    points = bins[:, :, None] + ((samples + 0.5) * (length / counts)[:, None])[:, None]
    is_sample = (points >= -1) & (points <= size) & (samples < counts[:, None, None])
    nearest = points.clamp(0, size - 1)
    hats = (1 - (nearest[..., None] - torch.arange(size, dtype=start.dtype)).abs()).clamp(min=0)
    return torch.where(is_sample[..., None], hats, 0).sum(2) / counts.clamp(min=1)[:, None, None]
