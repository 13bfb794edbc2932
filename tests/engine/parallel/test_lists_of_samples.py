"""Models that take lists with an item for each sample, as detectors do, are refused with a way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stagewright.engine.parallel.model import capture_for
from stagewright.errors import UsageError
from stagewright.spec.plan import Mesh, ModelSpec, Plan

IMAGES = [torch.ones(3, height, 24) for height in (20, 24, 28, 24)]
BOXES = [{"boxes": torch.ones(count, 4)} for count in (2, 1, 3, 2)]
CROPPED = (
    r"wrap the model in a module that takes tensors .* \(images of several sizes padded, their sizes in a tensor\)"
)


class Detector(nn.Module):
    """Images of several sizes, and boxes for each."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 3, stride=2), nn.Linear(8, 4)

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]] | None = None) -> Any:
        found = torch.cat([self.head(self.body(image[None]).mean((2, 3))) for image in images])
        if targets is None:
            return found
        return sum((row - target["boxes"]).abs().mean() for row, target in zip(found, targets, strict=True)) / len(
            found
        )


class Pyramid(nn.Module):
    """A list of feature maps, each with all samples: no list of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, maps: list[torch.Tensor]) -> torch.Tensor:
        total = torch.stack([self.head(features.mean((2, 3))) for features in maps]).sum(0)
        return total if total.sum() > 0 else -total  # a branch on values: it runs as one unit


def images_alone() -> tuple[nn.Module, tuple[Any, ...]]:
    return Detector(), (IMAGES,)


def images_and_boxes() -> tuple[nn.Module, tuple[Any, ...]]:
    return Detector(), (IMAGES, BOXES)


def pyramid() -> tuple[nn.Module, tuple[Any, ...]]:
    return Pyramid(), ([torch.ones(3, 8, 16, 16), torch.ones(3, 8, 8, 8)],)


@pytest.mark.parametrize("mesh", ["serial", "data=2", "pipeline=2"])
@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("images_alone", "argument 0 is a list of 4 tensors, and the model fails if their first dimension has 2 rows"),
        ("images_and_boxes", "argument 1 is a list of 4 dictionaries of tensors, one for each sample"),
    ],
)
def test_a_list_of_samples_is_refused_with_a_way_out(mesh: str, factory: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"{message}.*{CROPPED}"):
        capture(factory, mesh)


def test_a_list_of_tensors_with_all_samples_runs() -> None:
    assert capture("pyramid", "data=2").cuts == ()


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def capture(factory: str, mesh: str) -> Any:
    """Load and capture a model of this file."""
    workers = {} if mesh == "serial" else {"mesh": Mesh.parse(mesh)}
    plan = Plan(model=ModelSpec(name=f"{__name__.rpartition('.')[2]}:{factory}"), batch=4, **workers)
    return capture_for(plan, plan.model.load(batch=4))
