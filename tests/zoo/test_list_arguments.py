"""Which lists of an example hold an item for each sample, and how examples with such lists are resized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from stagewright.errors import UsageError
from stagewright.zoo.example import resized
from stagewright.zoo.model import Batch

IMAGES = [torch.ones(3, height, 8) for height in (4, 5, 6, 5)]
BOXES = [{"boxes": torch.ones(count, 4)} for count in (2, 1, 3, 2)]


@dataclass(frozen=True)
class Found:
    """Boxes of an image."""

    boxes: torch.Tensor


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("the model is run")


def lengths(batch: Batch) -> list[Any]:
    """Lengths of lists and first dimensions of tensors."""
    values = [*batch.args, *batch.kwargs.values(), batch.target]
    return [len(value) if isinstance(value, (list, tuple, torch.Tensor)) else value for value in values]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (Batch(args=(IMAGES, BOXES)), [6, 6, None]),
        (Batch(args=(IMAGES,), kwargs={"targets": BOXES}), [6, 6, None]),
        (Batch(args=(IMAGES,), kwargs={"found": [Found(torch.ones(2, 4))] * 4}), [6, 6, None]),
        (Batch(args=(torch.ones(4, 3), BOXES, torch.ones(2))), [6, 6, 2, None]),
        (Batch(args=(torch.ones(4, 3),), target=BOXES), [6, 6]),
        (Batch(args=(IMAGES, BOXES), target=[torch.tensor(1)] * 4), [6, 6, 6]),
        (Batch(args=(IMAGES[:3], BOXES[:3])), [6, 6, None]),  # as many images as channels
        (Batch(args=(IMAGES, BOXES, tuple(IMAGES[:2]))), [6, 6, 2, None]),
    ],
    ids=["arguments", "keywords", "dataclasses", "tensor", "target", "labels", "channels", "tuple"],
)
def test_lists_beside_records_hold_samples(batch: Batch, expected: list[Any]) -> None:
    size, make = resized(batch, Calls(never))
    assert size == (3 if len(batch.args[0]) == 3 else 4)
    assert lengths(make(6)) == expected
    assert make(size) is batch
    value, wanted = make(6).args[0][size], batch.args[0][0]
    assert torch.equal(value, wanted)


def per_image(model: Calls, images: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([(image * model.weight).sum() for image in images])


def per_level(model: Calls, maps: list[torch.Tensor], *_: Any) -> torch.Tensor:
    return torch.stack([level.flatten(1).sum(1) for level in maps]).sum(0)


@pytest.mark.parametrize(
    ("function", "batch", "size", "expected"),
    [
        (per_image, Batch(args=(IMAGES,)), 4, [6, None]),
        (per_image, Batch(args=(IMAGES[:1],)), 1, [6, None]),
        (per_level, Batch(args=([torch.ones(3, 8), torch.ones(3, 4)],)), 3, [2, None]),
        (per_level, Batch(args=([torch.ones(2, 8), torch.ones(2, 4)],)), 2, [2, None]),
        (per_level, Batch(args=([torch.ones(2, 8), torch.ones(2, 4)], torch.ones(2))), 2, [2, 6, None]),
    ],
    ids=["images", "one image", "levels", "as many levels as samples", "levels beside a tensor"],
)
def test_running_the_model_tells_lists_of_tensors_apart(
    function: Any, batch: Batch, size: int, expected: list[Any]
) -> None:
    found, make = resized(batch, Calls(function))
    assert found == size
    assert lengths(make(6)) == expected


def test_the_model_is_left_unchanged() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.num_calls = nn.BatchNorm1d(8), 0

        def forward(self, rows: list[torch.Tensor]) -> torch.Tensor:
            self.num_calls += 1
            return self.norm(torch.stack(rows))  # type: ignore[no-any-return]

    module, state = Counting(), torch.get_rng_state()
    assert resized(Batch(args=([torch.ones(8)] * 5,)), module)[0] == 5
    assert module.num_calls == 0
    assert module.norm.num_batches_tracked == 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("function", "batch", "message"),
    [
        (
            never,
            Batch(args=(IMAGES[:3], BOXES)),
            r"argument 0 is a list of 3 tensors, but argument 1 is a list of 4 dictionaries of tensors; give one item "
            r"for each sample in both, or a tuple of what is not divided by samples",
        ),
        (
            never,
            Batch(args=(IMAGES, BOXES[:3])),  # three, as many as channels
            r"argument 0 is a list of 4 tensors, but argument 1 is a list of 3 dictionaries of tensors; give .*",
        ),
        (
            lambda model, images, targets: per_image(model, images),
            Batch(args=(tuple(IMAGES), tuple(BOXES))),
            r"argument 0 is a tuple of 4 items, and the model runs with fewer items, not with a first dimension other "
            r"than 3: give a list of samples",
        ),
        (
            lambda model, rows: torch.cat(rows),
            Batch(args=([torch.ones(3, 2)] * 4,)),
            r"argument 0 is a list of 4 tensors whose first dimension is 3, and the model runs with fewer items and "
            r"with fewer rows: give a tuple if each tensor holds all 3 samples; if each is one of 4, wrap the model .*",
        ),
        (
            never,
            Batch(args=(torch.ones(4, 2),), target=[torch.ones(4, 4)] * 4),
            r"the target is a list of 4 tensors whose first dimension is 4 too: give a tuple if each tensor holds all "
            r"samples, or an example with another number of samples",
        ),
        (never, Batch(args=(3,)), "the example arguments contain no tensor with a batch dimension; .*"),
    ],
    ids=["lengths", "channels", "tuples", "both", "target", "nothing"],
)
def test_what_is_ambiguous_is_refused(function: Any, batch: Batch, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}$"):
        resized(batch, Calls(function))
