"""The cases of the grid: a model, an axis, its size, with or without a pipeline, in training or inference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stagewright.spec.plan import Mesh, ModelSpec, Plan

MODELS = ("Llama", "GPT-2", "BERT", "ViT", "Mixtral", "Qwen3-MoE", "T5")
WITH_EXPERTS = ("Mixtral", "Qwen3-MoE")
AXES: dict[str, tuple[str, dict[str, Any]]] = {
    "sequence parallelism": ("tensor", {"sequence_parallel": True}),
    "divided vocabulary": ("tensor", {"vocab_parallel": True}),
    "ZeRO-1": ("data", {"zero": 1}),
    "ZeRO-2": ("data", {"zero": 2}),
    "FSDP": ("data", {"shard": True}),
    "context parallelism, ring": ("context", {"context_attention": "ring"}),
    "context parallelism, all-to-all": ("context", {"context_attention": "all-to-all"}),
    "expert parallelism": ("expert", {}),
}
"""The axis of the mesh, and the options of the plan."""
SIZES = (2, 4)
JOBS = ("training", "inference")
BATCH = 10
"""Samples; replicas and micro-batches get unequal shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cell of the grid."""

    model: str
    axis: str
    workers: int
    """Workers along the axis."""
    pipeline: bool
    """With two pipeline stages, and so with twice as many workers."""
    job: str
    """Training or inference."""

    @property
    def mesh(self) -> Mesh:
        name, _ = AXES[self.axis]
        return Mesh.parse(f"{name}={self.workers}" + (",pipeline=2" if self.pipeline else ""))

    def plan(self, devices: tuple[str, ...]) -> Plan:
        """Return the plan, still without cuts."""
        _, options = AXES[self.axis]
        return Plan(
            model=ModelSpec(name=self.model),
            batch=BATCH,
            mesh=self.mesh,
            microbatches=2 if self.pipeline else 1,
            training=self.job == "training",
            devices=devices,
            **options,
        )

    def not_applicable(self) -> str:
        """Return why the combination makes no sense; empty if it does."""
        if self.axis == "divided vocabulary" and self.model == "ViT":
            return "ViT has no vocabulary"
        if self.axis == "expert parallelism" and self.model not in WITH_EXPERTS:
            return f"{self.model} has no experts"
        if self.axis.startswith("ZeRO") and self.job == "inference":
            return "inference has no gradients or optimizer states to shard"
        return ""

    @property
    def words(self) -> str:
        """The case as text, for `--only`."""
        pipeline = "with pipeline" if self.pipeline else "alone"
        return f"{self.model}, {self.axis}, {self.workers} workers, {pipeline}, {self.job}"


def all_cases() -> Iterator[Case]:
    """Yield every cell of the grid, in the order of the table."""
    for model in MODELS:
        for axis in AXES:
            for workers in SIZES:
                for pipeline in (False, True):
                    for job in JOBS:
                        yield Case(model=model, axis=axis, workers=workers, pipeline=pipeline, job=job)
