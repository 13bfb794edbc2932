"""``roi_align`` of the benchmark against its definition, bin by bin."""

from __future__ import annotations

import math

import pytest
import torch


def bilinear(image: torch.Tensor, y: float, x: float) -> torch.Tensor:
    """The value of ``[C, H, W]`` between pixels; zero outside, with a border of one pixel."""
    height, width = image.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return torch.zeros(image.shape[0], dtype=image.dtype)
    y, x = min(max(y, 0.0), height - 1.0), min(max(x, 0.0), width - 1.0)
    top, left = min(int(y), height - 1), min(int(x), width - 1)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    below, after = y - top, x - left
    upper = image[:, top, left] * (1 - after) + image[:, top, right] * after
    lower = image[:, bottom, left] * (1 - after) + image[:, bottom, right] * after
    return upper * (1 - below) + lower * below


def one_bin(
    image: torch.Tensor, box: list[float], row: int, column: int, bins: tuple[int, int], ratio: int
) -> torch.Tensor:
    """The mean of the samples in one bin of a box, in pixels of the map."""
    left, top, right, bottom = box
    height, width = (bottom - top) / bins[0], (right - left) / bins[1]
    rows, columns = (ratio, ratio) if ratio > 0 else (math.ceil(height), math.ceil(width))
    samples = [
        bilinear(image, top + height * (row + (index + 0.5) / rows), left + width * (column + (other + 0.5) / columns))
        for index in range(rows)
        for other in range(columns)
    ]
    return torch.stack(samples).mean(0)


@pytest.mark.parametrize("ratio", [2, 3, -1])
@pytest.mark.parametrize("is_aligned", [False, True])
def test_every_bin_is_the_mean_of_its_samples(ratio: int, is_aligned: bool) -> None:
    from libraries.region_align import align_regions

    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(3, 2, 9, 11, generator=generator, dtype=torch.float64)
    corners = torch.rand(12, 2, generator=generator, dtype=torch.float64) * 50 - 12
    sizes = 4 + torch.rand(12, 2, generator=generator, dtype=torch.float64) * 40
    images = torch.tensor([0, 2] * 6, dtype=torch.float64)
    regions = torch.cat([images[:, None], corners, corners + sizes], dim=1)
    found = align_regions(maps, regions, 0.25, 3, 2, ratio, is_aligned)
    assert found.shape == (12, 2, 3, 2)
    for index, (image, *box) in enumerate(regions.tolist()):
        scaled = [0.25 * value - (0.5 if is_aligned else 0.0) for value in box]
        for row in range(3):
            for column in range(2):
                expected = one_bin(maps[int(image)], scaled, row, column, (3, 2), ratio)
                assert torch.allclose(found[index, :, row, column], expected, atol=1e-12)


def test_gradients_reach_the_maps_only() -> None:
    from libraries.region_align import align_regions

    maps = torch.ones(1, 1, 8, 8, dtype=torch.float64, requires_grad=True)
    regions = torch.tensor([[0.0, 1.0, 1.0, 5.0, 5.0]], dtype=torch.float64, requires_grad=True)
    align_regions(maps, regions, 1.0, 2, 2, 2, False).sum().backward()
    assert maps.grad is not None
    assert float(maps.grad.sum()) == pytest.approx(4.0)
    assert regions.grad is None


def test_no_region() -> None:
    from libraries.region_align import align_regions

    maps = torch.ones(1, 3, 8, 8, requires_grad=True)
    found = align_regions(maps, torch.zeros(0, 5), 1.0, 2, 2, -1, False)
    assert found.shape == (0, 3, 2, 2)
    assert found.requires_grad
