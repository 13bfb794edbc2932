"""Worker functions for tests of sequence parallelism, run by ``pool``: whole plans under the parity check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp_jobs
import vocabulary_jobs
from expert_jobs import make_plan
from parity_jobs import checked_traffic, compare_resumed

from jobs import context_of
from stagewright.engine.parallel.trainer import Trainer
from stagewright.spec.plan import OptimizerSpec
from stagewright.zoo.model import Model


def make_model(name: str) -> Model:
    """Build a tiny transformer with dropout: llama, gpt2, bert, t5 with 8 tokens, or vit with 17."""
    return fsdp_jobs.make_vit(16) if name == "vit" else vocabulary_jobs.make_model(name)


def parity(rank: int, name: str, mesh: str, **more: Any) -> dict[str, Any]:
    """Check the parity of a plan; return the report, the bytes of the tensor axis, and the saved activations."""
    model = make_model(name)
    model.module.train(more.get("training", True))
    plan = make_plan(mesh, model, **{"sequence_parallel": True, **more})
    runner, report, sent = checked_traffic(rank, plan, model, mesh, lambda runner: runner.part.tensor_axis)
    partial = sum(value.numel() * value.element_size() for value in runner.part.divided_parameters())
    return {"report": report, "bytes": sent, "partial": partial, "replicated": runner.part.replicated}


def resumed(rank: int, folder: str, before: bool, after: bool) -> float:
    """Train two steps, save, and train two more with and without divided sequences; compare with training on."""

    def trainer(divided: bool) -> Trainer:
        model = make_model("gpt2")
        optimizer = OptimizerSpec(name="adamw", learning_rate=0.01)
        plan = make_plan("tensor=2", model, sequence_parallel=divided, optimizer=optimizer)
        return Trainer(plan, model, context_of(rank, "tensor=2"))

    batch = make_model("gpt2").example(vocabulary_jobs.BATCH)
    return compare_resumed(trainer, batch, Path(folder) / "checkpoint", before, after)
