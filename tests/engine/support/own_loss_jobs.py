"""What workers do in the tests of models to which no loss is given; imported by name in the engine's ``pool``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from stagewright.cluster.device import Device
from stagewright.engine.parallel.model import capture_for
from stagewright.engine.parallel.parallelize import parallelize
from stagewright.engine.parallel.step_runner import StepRunner
from stagewright.engine.parity.check import baseline_of, check_parity
from stagewright.engine.worker.context import make_context
from stagewright.errors import UsageError
from stagewright.spec.plan import Mesh, ModelSpec, OptimizerSpec, Plan
from stagewright.zoo.example import resized
from stagewright.zoo.loss import default_loss
from stagewright.zoo.model import Batch, Model

SIZE, LENGTH, CLASSES = 12, 5, 7


class Tagger(nn.Module):
    """Returns its loss, a mean over the tokens that are labelled, beside its logits; or the loss alone."""

    def __init__(self, alone: bool = False) -> None:
        super().__init__()
        self.embed, self.alone = nn.Embedding(20, 16), alone
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return loss if self.alone else {"loss": loss, "logits": logits}


def tagger(alone: bool = False) -> Tagger:
    torch.manual_seed(0)
    return Tagger(alone)


def example(size: int = SIZE) -> Batch:
    """Samples with more and more labels."""
    source = torch.Generator().manual_seed(1)
    ids = torch.randint(20, (size, LENGTH), generator=source)
    labels = torch.randint(CLASSES, (size, LENGTH), generator=source)
    labels[torch.arange(LENGTH) > torch.arange(size)[:, None] // 3] = -100
    return Batch(kwargs={"ids": ids, "labels": labels})


def pieces(num: int) -> list[dict[str, torch.Tensor]]:
    """The example in equal pieces."""
    chunks = {name: value.chunk(num) for name, value in example().kwargs.items()}
    return [{name: value[at] for name, value in chunks.items()} for at in range(num)]


def plain(num_pieces: int, *, alone: bool = False) -> dict[str, Any]:
    """Three steps of the plain model by hand, a mean over pieces; then its loss in eval mode."""
    model = tagger(alone)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        results = [model(**piece) for piece in pieces(num_pieces)]
        loss = sum(one if alone else one["loss"] for one in results) / num_pieces
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        results = [model(**piece) for piece in pieces(num_pieces)]
    return {
        "losses": losses,
        "evaluated": sum(float(one if alone else one["loss"]) for one in results) / num_pieces,
        "logits": [] if alone else torch.cat([one["logits"] for one in results]).tolist(),
    }


def trained(rank: int, mesh: str, microbatches: int, *, alone: bool = False) -> dict[str, Any]:
    """The same under a plan, with no loss given; the logits are those of this runner, where the last stage is."""
    shape = Mesh.parse(mesh)
    plan = Plan(
        model=ModelSpec(name="tagger"),
        batch=SIZE,
        mesh=shape,
        microbatches=microbatches,
        cuts=("layers.1",) if shape.pipeline > 1 else (),
        devices=("cpu:0",) * shape.num_workers,
        optimizer=OptimizerSpec(name="sgd", learning_rate=0.5, momentum=0.0, weight_decay=0.0),
    )
    trainer = parallelize(tagger(alone), example(), plan=plan)
    losses = [trainer.step(example()).loss for _ in range(3)]
    evaluation = trainer.evaluate(example())
    logits = [] if alone else [row for one in evaluation.outputs for row in one["logits"].tolist()]
    return {"losses": losses, "evaluated": evaluation.loss, "logits": logits}


def half_labelled() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A model and samples of which the first half has no label."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.randn(8, 4), torch.arange(8) // 4 * torch.randint(1, 3, (8,))


def sometimes_constant(rank: int, shard: bool, microbatches: int) -> list[float]:
    """Losses of three steps of replicas, one of which has no label."""
    model, inputs, target = half_labelled()
    plan = Plan(
        model=ModelSpec(name="x"),
        batch=8,
        mesh=Mesh(data=2),
        shard=shard,
        microbatches=microbatches,
        devices=("cpu:0",) * 2,
        optimizer=OptimizerSpec(name="sgd", learning_rate=0.5, momentum=0.0, weight_decay=0.0),
    )
    trainer = parallelize(model, (inputs, target), loss=where_labelled, plan=plan)
    return [trainer.step((inputs, target)).loss for _ in range(3)]


def by_hand(num_pieces: int) -> list[float]:
    """The same with the plain model."""
    model, inputs, target = half_labelled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        pairs = zip(inputs.chunk(num_pieces), target.chunk(num_pieces), strict=True)
        loss = sum(where_labelled(model(one), wanted) for one, wanted in pairs) / num_pieces
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def where_labelled(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of samples with a label; a constant where there are none."""
    kept = target > 0
    return functional.cross_entropy(output[kept], target[kept] - 1) if kept.any() else torch.tensor(0.25)


def refused(rank: int) -> str:
    """A model that returns no loss, and no loss is given."""
    plan = Plan(model=ModelSpec(name="x"), batch=4, devices=("cpu:0",))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    try:
        parallelize(model, (torch.ones(4, 4), torch.zeros(4)), plan=plan)
    except UsageError as error:
        return str(error)
    return "taken"


def headless(rank: int, *, square: bool) -> dict[str, Any]:
    """A transformer that ends with a layer norm, proven under the tensor axis with the loss that stands in, or
    with the mean square of its outputs."""
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    config = ViTConfig(
        image_size=16,
        patch_size=8,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    module = ViTModel(config, add_pooling_layer=False)
    batch_size, make = resized(Batch(args=(torch.randn(6, 3, 16, 16),)), module)
    model = Model(
        name="headless",
        module=module,
        args=make(batch_size).args,
        loss=(lambda output, target: output[0].square().mean()) if square else default_loss,
        batch_size=batch_size,
        make_example=make,
    )
    plan = Plan(model=ModelSpec(name="headless"), batch=batch_size, mesh=Mesh(tensor=2), devices=("cpu:0",) * 2)
    context = make_context(plan.mesh, rank, Device.parse("cpu:0"))
    graph = capture_for(plan, model)
    baseline = baseline_of(plan, model, graph, context) if rank == 0 else None
    found = check_parity(StepRunner(plan, model, context, graph), Batch(args=model.args), baseline).to_dict()
    return {**found, "source": baseline.loss_source if baseline else None}
