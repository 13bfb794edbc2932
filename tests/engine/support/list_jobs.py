"""Training on lists with an item for each sample; run by ``pool`` (first argument: the rank)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stagewright.cluster.device import Device
from stagewright.engine.parallel.parallelize import parallelize
from stagewright.engine.parallel.trainer import Trainer
from stagewright.engine.worker.context import make_context
from stagewright.spec.plan import Mesh, ModelSpec, OptimizerSpec, Plan
from stagewright.zoo.example import resized
from stagewright.zoo.loss import default_loss
from stagewright.zoo.model import Batch, Model

Images = list[torch.Tensor]
Targets = list[dict[str, torch.Tensor]]


class Detector(nn.Module):
    """Images of several sizes are batched inside, as in torchvision's detectors, and losses come in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.neck = nn.Conv2d(3, 8, 3, stride=2), nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8, 4)

    def batched(self, images: Images) -> torch.Tensor:
        height, width = 28, 22  # the same in every micro-batch
        padding = [(0, width - image.shape[2], 0, height - image.shape[1]) for image in images]
        return torch.stack([nn.functional.pad(image, pad) for image, pad in zip(images, padding, strict=True)])

    def forward(self, images: Images, targets: Targets) -> dict[str, torch.Tensor]:
        found = self.head(self.neck(self.body(self.batched(images)).relu()).mean((2, 3)))
        distances = [(row - target["boxes"]).abs().mean() for row, target in zip(found, targets, strict=True)]
        return {"boxes": torch.stack(distances).mean(), "size": found.square().mean()}


class Checking(Detector):
    """A detector that checks boxes by value before its first layer, so capture can't take it."""

    def forward(self, images: Images, targets: Targets) -> dict[str, torch.Tensor]:
        if any((target["boxes"] < 0).any() for target in targets):
            raise ValueError("a box is outside of its image")
        return super().forward(images, targets)


class Dropping(Detector):
    """A detector with dropout."""

    def batched(self, images: Images) -> torch.Tensor:
        return nn.functional.dropout(super().batched(images), 0.2, self.training)


def samples(count: int, seed: int = 0, heights: Sequence[int] = (20, 24, 28)) -> tuple[Images, Targets]:
    """Images of several heights, with one to three boxes each."""
    generator = torch.Generator().manual_seed(seed)
    images = [torch.rand(3, heights[index % len(heights)], 22, generator=generator) for index in range(count)]
    return images, [{"boxes": torch.rand(1 + index % 3, 4, generator=generator)} for index in range(count)]


def make(kind: type[Detector], count: int = 4, heights: Sequence[int] = (20, 24, 28)) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return kind(), samples(count, heights=heights)


def detector() -> tuple[nn.Module, Any]:
    return make(Detector, 5)


def checking() -> tuple[nn.Module, Any]:
    return make(Checking, 5)


def dropping() -> tuple[nn.Module, Any]:
    return make(Dropping, 5)


def dropping_alike() -> tuple[nn.Module, Any]:
    return make(Dropping, 4, heights=(24,))


def training(rank: int, kind: str, mesh: str, sizes: Sequence[int], **options: Any) -> dict[str, Any]:
    """Train one step for each batch size; return the differences from plain torch on the whole batch."""
    shape, detectors = Mesh.parse(mesh), {"detector": Detector, "checking": Checking}
    plan = Plan(
        model=ModelSpec(name=kind),
        mesh=shape,
        batch=4,
        cuts=("body",) if shape.pipeline > 1 else (),
        devices=("cpu:0",) * shape.num_workers,
        optimizer=OptimizerSpec(name="sgd", learning_rate=0.1),
        **options,
    )
    module, example = make(detectors[kind])
    batch = Batch(args=example)
    model = Model(
        name=kind, module=module, args=example, loss=default_loss, batch_size=4, make_example=resized(batch, module)[1]
    )
    trainer = Trainer(plan, model, make_context(shape, rank, Device.parse("cpu:0")))
    plain = make(detectors[kind])[0]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    errors = []
    for seed, size in enumerate(sizes):
        given = samples(size, seed=seed + 1)
        with torch.no_grad():
            before = float(sum(plain(*given).values()))
        evaluated = trainer.evaluate(Batch(args=given)).loss
        optimizer.zero_grad()
        losses = plain(*given)
        (losses["boxes"] + losses["size"]).backward()
        optimizer.step()
        expected = float(losses["boxes"] + losses["size"])
        step = trainer.step(Batch(args=given))
        assert step.num_samples == size
        errors.append((abs(step.loss - expected) / expected, abs(evaluated - before) / before))
    state = trainer.state_dict()
    worst = max(float((state[name] - value).abs().max()) for name, value in plain.state_dict().items())
    return {"errors": errors, "worst": worst, "stages": len(trainer.runner.part.cuts) + 1}


def user_loop(rank: int, mesh: str) -> dict[str, Any]:
    """Train in a user's loop."""
    module, example = make(Checking)
    plan = Plan(
        model=ModelSpec(name="checking"),
        mesh=Mesh.parse(mesh),
        batch=4,
        devices=("cpu:0",) * Mesh.parse(mesh).num_workers,
    )
    trainer = parallelize(module, Batch(args=example), plan=plan)
    return {"losses": [trainer.step(Batch(args=samples(size, seed=size))).loss for size in (4, 3, 6)]}
