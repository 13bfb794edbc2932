"""Training of a model whose workers read only their part of the weights; run by ``pool`` (first argument: the rank)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stagewright.cluster.device import Device
from stagewright.engine.parallel.model import load_model
from stagewright.engine.parallel.trainer import Trainer
from stagewright.engine.worker.context import make_context
from stagewright.machine.hollow import is_hollow
from stagewright.spec.plan import Mesh, ModelSpec, OptimizerSpec, Plan
from stagewright.zoo.model import Batch


def plan_of(model: str, mesh: str, **options: Any) -> Plan:
    """A plan for four sequences in two micro-batches."""
    shape = Mesh.parse(mesh)
    return Plan(
        model=ModelSpec(name=model, sequence_length=6),
        mesh=shape,
        batch=4,
        microbatches=2 if shape.pipeline > 1 else 1,
        devices=(str(Device.parse("cpu:0")),) * shape.num_workers,
        optimizer=OptimizerSpec(name="adamw", learning_rate=0.02),
        **options,
    )


def train(rank: int, model: str, mesh: str, hollow: bool, saved: str | None = None, **options: Any) -> dict[str, Any]:
    """Train two steps; return losses, the final state, the bytes of parameters right after loading and in the part."""
    plan = plan_of(model, mesh, **options)
    context = make_context(plan.mesh, rank, Device.parse("cpu:0"))
    folder = Path(saved) / "model" if saved is not None else None
    loaded = load_model(plan, context, hollow=hollow, checkpoint=folder)
    before = {parameter.untyped_storage().data_ptr(): parameter for parameter in loaded.module.parameters()}
    loaded_bytes = sum(parameter.untyped_storage().nbytes() for parameter in before.values())
    trainer = Trainer(plan, loaded, context)
    if saved is not None:
        trainer.load(saved)
    held = list(trainer.runner.part.module.parameters())
    batch = Batch(args=loaded.args, kwargs=loaded.kwargs, target=loaded.target)
    losses = [trainer.step(batch).loss for _ in range(2)]
    return {
        "losses": losses,
        "state": {name: value.clone() for name, value in trainer.state_dict().items()},
        "loaded_bytes": loaded_bytes,
        "held_bytes": sum(
            parameter.to_local().nbytes if hasattr(parameter, "to_local") else parameter.nbytes for parameter in held
        ),
        "hollow": sum(is_hollow(parameter) for parameter in held if not hasattr(parameter, "to_local")),
        "whole_bytes": sum(value.nbytes for value in {id(v): v for v in trainer.state_dict().values()}.values()),
    }


def save(rank: int, model: str, folder: str) -> None:
    """Train one step on a single worker and write a checkpoint."""
    plan = plan_of(model, "serial")
    context = make_context(plan.mesh, rank, Device.parse("cpu:0"))
    loaded = load_model(plan, context)
    trainer = Trainer(plan, loaded, context)
    trainer.step(Batch(args=loaded.args, kwargs=loaded.kwargs, target=loaded.target))
    trainer.save(folder)


def compare_states(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference."""
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)
