"""The plan: everything that a run needs, as plain values.

Pure Python, no torch. A plan says what was wanted (`split = "optimal"`, `placement = "auto"`); a resolved plan also
says what came of it (`cuts`, `devices`) and runs again as it did. The rules are in `check`, the file in `file`.

    world rank = (data · T + tensor) · P + pipeline        data=2, pipeline=2:   replica 0: workers 0 1
    (pipeline innermost: neighbours in a pipeline are neighbours in rank)        replica 1: workers 2 3
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from stagewright.errors import UnknownName, UsageError
from stagewright.schedules.catalog import PLACEMENTS, SCHEDULES, Placement, ScheduleName

if TYPE_CHECKING:
    import torch

    from stagewright.zoo import Model

__all__ = ["AXES", "Axis", "Mesh", "ModelSpec", "OptimizerSpec", "Plan", "Recompute"]

Axis: TypeAlias = Literal["data", "tensor", "pipeline"]
AXES: tuple[Axis, ...] = ("data", "tensor", "pipeline")
Recompute: TypeAlias = Literal["none", "always", "except-last"] | tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Which model, and of which size: what `zoo.load` takes."""

    name: str
    """A name from the catalogue, `hf:org/name`, `hf:folder` or `package.module:factory`."""
    weights: str | None = None
    """A folder of safetensors, or "random"; None: the model's own."""
    image_size: int | None = None
    """Pixels a side; None: the model's own, as for all that follow."""
    sequence_length: int | None = None
    """Tokens a sample."""
    num_classes: int | None = None
    """Classes of a classifier."""
    padded: bool | None = None
    """Whether texts have different lengths, with an attention mask."""
    seed: int = 0
    """Of random weights and of the example batch."""

    def load(self, batch: int | None = None, dtype: torch.dtype | str | None = None) -> Model:
        """Build the model with an example of `batch` samples."""
        from stagewright import zoo

        return zoo.load(
            self.name,
            batch=batch,
            weights=self.weights,
            seed=self.seed,
            image_size=self.image_size,
            sequence_length=self.sequence_length,
            num_classes=self.num_classes,
            padded=self.padded,
            dtype=dtype,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """How many workers along each axis; 1 × 1 × 1 is serial."""

    data: int = 1
    """Replicas that each take a share of the batch."""
    tensor: int = 1
    """Workers that share the matrices of each layer."""
    pipeline: int = 1
    """Workers that hold different stages."""

    def __post_init__(self) -> None:
        for axis in AXES:
            if self.size(axis) < 1:
                raise UsageError(f"mesh: {axis} = {self.size(axis)}, but every axis has at least 1 worker")

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Reads `data=2,pipeline=2` or `serial`; an axis that is left out is 1."""
        sizes: dict[str, int] = {}
        for part in [] if text.strip() == "serial" else text.split(","):
            axis, _, number = (word.strip() for word in part.partition("="))
            if axis not in AXES:
                raise UnknownName("axis of a mesh", axis, AXES, hint=f"(in {text!r}; write data=2,pipeline=2)")
            if axis in sizes or not (number.isascii() and number.isdigit()):
                wrong = f"{axis} is there twice" if axis in sizes else f"{axis} needs a whole number, not {number!r}"
                raise UsageError(f"{text!r} is not a mesh: {wrong}; write data=2,pipeline=2")
            sizes[axis] = int(number)
        return cls(**sizes)

    def __str__(self) -> str:
        return ",".join(f"{axis}={self.size(axis)}" for axis in AXES if self.size(axis) > 1) or "serial"

    @property
    def num_workers(self) -> int:
        """Workers in all."""
        return self.data * self.tensor * self.pipeline

    @property
    def strategy(self) -> str:
        """The axes that have more than one worker: "serial", "pipeline", "data×pipeline"."""
        return "×".join(axis for axis in AXES if self.size(axis) > 1) or "serial"

    def size(self, axis: Axis) -> int:
        """Workers along an axis."""
        return {"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline}[axis]

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """The place of a worker along data, tensor and pipeline."""
        if not 0 <= rank < self.num_workers:
            raise UsageError(f"worker {rank} is not on the mesh {self}, which has workers 0 to {self.num_workers - 1}")
        rest, pipeline = divmod(rank, self.pipeline)
        return (*divmod(rest, self.tensor), pipeline)

    def rank(self, data: int, tensor: int, pipeline: int) -> int:
        """The worker at a place: the inverse of `coordinates`."""
        return (data * self.tensor + tensor) * self.pipeline + pipeline

    def ranks_along(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The workers that differ from this one along one axis alone, itself among them, in order."""
        place = dict(zip(AXES, self.coordinates(rank), strict=True))
        return tuple(self.rank(**{**place, axis: index}) for index in range(self.size(axis)))


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """How parameters are changed."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    """Its name."""
    learning_rate: float = 0.01
    """The step size."""
    momentum: float = 0.0
    """Of sgd: the share of the last change that is kept."""
    weight_decay: float = 0.0
    """Decay of the weights; adamw's is decoupled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that a run needs."""

    model: ModelSpec
    """The model."""
    batch: int
    """Samples in a step, over all replicas."""
    mesh: Mesh = field(default_factory=Mesh)
    """Workers along each axis."""
    microbatches: int = 1
    """Chunks into which each replica cuts its share of the batch."""
    schedule: ScheduleName = "1f1b"
    """The order of micro-batches on stages."""
    split: str = "optimal"
    """The policy that chooses the cuts; not asked where `cuts` are given."""
    cuts: tuple[str, ...] = ()
    """The units after which the model is cut, in order; a resolved plan has these."""
    units: str = "auto"
    """What is placed as a whole: auto (blocks), leaf, or names of modules with commas."""
    placement: Placement | Literal["auto"] = "auto"
    """Which worker of a pipeline holds which stage; auto: as the policy or the schedule wants it."""
    stages: int | None = None
    """Stages of a pipeline; None: as many as schedule and placement want at least."""
    recompute: Recompute = "none"
    """Whether stages keep their inputs only and run forward again in the backward pass; or one answer a stage."""
    shard: bool = False
    """Whether replicas share parameters, gradients and optimiser states (FSDP2) instead of each having all."""
    codec: str | tuple[str, ...] = "none"
    """How activations are written on the links between workers, and their gradients unless the next key says otherwise:
    a codec's name, "auto" (what pays, measured on the first batch), or one for each cut."""
    codec_backward: str | tuple[str, ...] | None = None
    """The same for gradients; None: as `codec`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters and activations."""
    batch_norm: Literal["plain", "deferred"] = "plain"
    """Batch norm's running statistics: of each micro-batch (plain), or as of the full batch (deferred)."""
    training: bool = True
    """Forward and backward, or forward alone in eval mode."""
    devices: tuple[str, ...] = ()
    """The device of each worker, by rank: "cpu:0", "cuda:1"; empty: chosen when the run starts."""
    memory_bytes: int | None = None
    """Memory that each device may use; None: not limited."""
    seed: int = 0
    """Of dropout and of the order of samples."""
    steps: int = 10
    """Steps that are measured."""
    warmup: int = 3
    """Steps before these that are not."""
    task: str | None = None
    """The task to train; None: the model's example batch, again and again."""
    epochs: int | None = None
    """Passes over the task's training samples; None: `steps` decide."""
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    """How parameters are changed."""
    clip: float | None = None
    """The largest norm of the whole model's gradient: a longer one is scaled down to it; None: as it is."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints; None: no checkpoints."""

    @property
    def resolved_placement(self) -> Placement:
        """The placement, where auto is what the policy or the schedule wants."""
        if self.placement != "auto":
            return self.placement
        if self.split == "client-server" and self.mesh.pipeline > 1:
            return "client-server"
        rule = SCHEDULES.get(self.schedule)
        return rule.placement if rule else "in-order"

    @property
    def num_stages(self) -> int:
        """Stages of a pipeline."""
        if self.stages is not None:
            return self.stages
        if self.cuts:
            return len(self.cuts) + 1
        if self.resolved_placement == "client-server":
            return self.mesh.pipeline + 1
        if self.mesh.pipeline == 1 and self.resolved_placement == "in-order":
            return 1
        rule = SCHEDULES.get(self.schedule)
        return self.mesh.pipeline * (rule.stages_per_worker if rule else 1)

    @property
    def stage_workers(self) -> tuple[int, ...]:
        """The place along the pipeline of the worker that holds each stage."""
        return PLACEMENTS[self.resolved_placement](self.num_stages, self.mesh.pipeline)

    def stages_of(self, pipeline: int) -> tuple[int, ...]:
        """The stages that the worker at a place along the pipeline holds."""
        return tuple(stage for stage, worker in enumerate(self.stage_workers) if worker == pipeline)

    def codec_of(self, cut: int, *, backward: bool = False) -> str:
        """How what crosses a cut is written on its link."""
        chosen = self.codec if not backward or self.codec_backward is None else self.codec_backward
        return chosen if isinstance(chosen, str) else chosen[cut]

    @property
    def has_codecs(self) -> bool:
        """Whether anything is compressed."""
        return any(
            self.codec_of(at, backward=way) != "none" for at in range(self.num_stages - 1) for way in (False, True)
        )

    def recomputes(self, stage: int) -> bool:
        """Whether a stage runs forward again in the backward pass, for all micro-batches or all but the last."""
        if isinstance(self.recompute, tuple):
            return self.recompute[stage]
        return self.recompute != "none"
