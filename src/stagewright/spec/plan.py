"""The plan: everything a run needs, as plain values without torch.

A plan states what the user wants (`split = "optimal"`, `placement = "auto"`). A resolved plan also records the
outcome (`cuts`, `devices`), so it can be rerun unchanged. `plan_rules` checks plans, `plan_file` reads and writes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from stagewright.schedules.rules import PLACEMENTS, SCHEDULES, Placement, ScheduleName
from stagewright.spec.mesh import AXES as AXES, AXIS_ALIASES as AXIS_ALIASES, Axis as Axis, Mesh as Mesh
from stagewright.spec.optimizers import DEFAULT_LEARNING_RATE, DEFAULT_OPTIMIZER

if TYPE_CHECKING:
    import torch

    from stagewright.zoo import Model

Precision: TypeAlias = Literal["float32", "bf16", "bf16-mixed", "fp16-mixed"]
FSDPGather: TypeAlias = Literal["auto", "step", "microbatch"]
ContextAttention: TypeAlias = Literal["ring", "all-to-all"]
Compile: TypeAlias = Literal["none", "stages", "units"]
BaselineMode: TypeAlias = Literal["auto", "whole", "streamed"]
Recompute: TypeAlias = Literal["none", "always", "except-last", "attention"] | tuple[bool, ...] | tuple[str, ...]
_FILES = "stagewright.spec.plan_file"  # it imports this module
OF_ATTENTION = ":attention"  # suffix of a unit in `recompute` of which attention alone is recomputed
Offload: TypeAlias = Literal["none", "always"] | tuple[str, ...]

AUTOCAST_DTYPES: dict[str, Literal["bfloat16", "float16"]] = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model and its size: the arguments of `zoo.load`."""

    name: str
    """A name from the catalog, `hf:org/name`, `hf:folder` or `package.module:factory`."""
    weights: str | None = None
    """A folder of safetensors, or "random"; None: the model's default."""
    image_size: int | None = None
    """Height and width in pixels; None: the model's default, as for the options below."""
    sequence_length: int | None = None
    """Tokens per sample."""
    num_classes: int | None = None
    padded: bool | None = None
    """Whether text samples have different lengths, with an attention mask."""
    seed: int = 0
    """Seed of random weights and of the example batch."""

    def load(
        self,
        batch: int | None = None,
        dtype: torch.dtype | str | None = None,
        *,
        hollow: bool = False,
        checkpoint: Path | None = None,
    ) -> Model:
        """Build the model with an example of `batch` samples; `hollow`, `checkpoint`: see ``zoo.load``."""
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
            hollow=hollow,
            checkpoint=checkpoint,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """An optimizer and its hyperparameters."""

    name: str = DEFAULT_OPTIMIZER
    """A name of `OPTIMIZERS`."""
    learning_rate: float = DEFAULT_LEARNING_RATE
    momentum: float = 0.0
    """Only for optimizers that have it, such as sgd."""
    weight_decay: float = 0.0
    """Decoupled weight decay for adamw, an L2 penalty for the others."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or a linear or cosine decay to 0 at the last step."""
    lr_warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything a run needs."""

    model: ModelSpec
    batch: int
    """Global batch: samples per step over all replicas."""
    mesh: Mesh = field(default_factory=Mesh)
    microbatches: int = 1
    """Micro-batches per replica and step."""
    schedule: ScheduleName = "1f1b"
    """Order of micro-batches on the pipeline stages."""
    actions: tuple[str, ...] = ()
    """The actions of each pipeline worker in their order, under schedule "searched"; empty: still to be searched."""
    split: str = "optimal"
    """Policy that chooses the cuts; unused if `cuts` are given."""
    cuts: tuple[str, ...] = ()
    """Units after which the model is cut, in order. Always set in a resolved plan."""
    units: str = "auto"
    """Modules that are never split: auto (blocks), leaf, or comma-separated module names."""
    placement: Placement | Literal["auto"] = "auto"
    """Which pipeline worker holds which stage; auto: the default of the policy or the schedule."""
    stages: int | None = None
    """Pipeline stages; None: the minimum that schedule and placement need."""
    recompute: Recompute = "none"
    """Activation checkpointing: stages save only their inputs and recompute forward in backward; or one flag per
    stage; or the names of the units that do; or only attention inside units, between its linear layers."""
    offload: Offload = "none"
    """Units whose saved activations go to host memory until backward; always: all that are not recomputed."""
    shard: bool = False
    """FSDP: shard parameters, gradients and optimizer states over the replicas (FSDP2)."""
    fsdp_shards: int | None = None
    """HSDP: replicas among which FSDP shards; groups of so many neighbors replicate each other. None: all replicas."""
    fsdp_gather: FSDPGather = "auto"
    """How often FSDP all-gathers parameters in training: once per `step`, or for each pass of each `microbatch`, which
    needs less memory and sends more; auto: step in a pipeline, microbatch without."""
    zero: int = 0
    """ZeRO stage of replicas that hold all parameters: 1 shards optimizer states, 2 also gradients; 3 is `shard`."""
    vocab_parallel: bool = False
    """Tensor parallel workers divide the vocabulary: embeddings, heads, and the cross-entropy of divided logits."""
    sequence_parallel: bool = False
    """Tensor parallel workers divide the sequence between their divided layers: norms, dropout and residuals."""
    context_attention: ContextAttention = "ring"
    """Attention of context parallel workers: keys and values go around a ring, or all-to-alls divide heads."""
    codec: str | tuple[str, ...] = "none"
    """Compression of activations between stages, and of their gradients unless `codec_backward` is set: a codec name,
    "auto" (chosen on the first batch by measured benefit), or one per cut."""
    codec_backward: str | tuple[str, ...] | None = None
    """Compression of gradients between stages; None: same as `codec`."""
    precision: Precision = "float32"
    """float32; bf16: parameters and activations in bfloat16; bf16-mixed, fp16-mixed: autocast, with float32 parameters,
    gradients and optimizer states. fp16-mixed scales the loss."""
    compile: Compile = "none"
    """What `torch.compile` compiles: none, stages or units. Stages are compiled unit by unit where replicas or
    tensor-parallel workers communicate between units, or where units draw random numbers."""
    optimizer_in_backward: bool = False
    """Step each parameter as soon as backward has its gradient, and free the gradient."""
    cuda_graphs: bool = False
    """Launch forward and backward of each stage as CUDA graphs."""
    batch_norm: Literal["plain", "deferred"] = "plain"
    """Batch norm's running statistics: per micro-batch (plain), or of the full batch (deferred)."""
    training: bool = True
    """Forward and backward; False: forward only, in eval mode."""
    devices: tuple[str, ...] = ()
    """Device of each worker, by rank: "cpu:0", "cuda:1"; empty: chosen when the run starts."""
    speeds: tuple[float, ...] | Literal["measured"] = ()
    """Relative speed of each worker's device, by rank: replicas get shares of the batch, and stages sizes, in
    proportion. "measured": each worker times the model on its device when the run starts. Empty: all alike."""
    memory_bytes: int | None = None
    """Memory limit per device; None: no limit."""
    seed: int = 0
    """Seed of dropout and of the sample order."""
    steps: int = 10
    """Measured steps."""
    warmup: int = 3
    """Unmeasured steps before them."""
    baseline: BaselineMode = "auto"
    """How the parity check runs the single-device baseline: the whole model, or streamed, unit by unit with weights
    read from files; auto: streamed where the whole model does not fit."""
    task: str | None = None
    """Task to train; None: repeat the model's example batch."""
    epochs: int | None = None
    """Passes over the task's training samples; None: use `steps`."""
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    clip: float | None = None
    """Maximum gradient norm of the whole model (gradient clipping); None: no clipping."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints; None: no checkpoints."""

    @classmethod
    def of(cls, model: str, batch: int, mesh: str = "serial", **options: Any) -> Plan:
        """Create a plan for a model's name and a mesh such as ``data=2,pipeline=2``."""
        return cls(model=ModelSpec(name=model), batch=batch, mesh=Mesh.parse(mesh), **options)

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """Read and check a plan file, such as the plan.toml of a run or of `stagewright plan`."""
        return import_module(_FILES).read_plan(path)  # type: ignore[no-any-return]

    def write(self, path: str | Path) -> None:
        """Write the plan with every key to a file."""
        import_module(_FILES).write_plan(self, path)

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        """Data type of parameters, gradients and optimizer states."""
        return "bfloat16" if self.precision == "bf16" else "float32"

    @property
    def autocast_dtype(self) -> Literal["bfloat16", "float16"] | None:
        """Data type of autocast operations; None without autocast."""
        return AUTOCAST_DTYPES.get(self.precision)

    @property
    def compute_dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        """Data type of most operations."""
        return self.autocast_dtype or self.dtype

    @property
    def communicates_every_microbatch(self) -> bool:
        """Whether replicas communicate in each micro-batch: FSDP, ZeRO-2 and expert parallelism."""
        return self.shard or (self.training and self.zero == 2) or self.mesh.expert > 1

    @property
    def num_shards(self) -> int:
        """Shards that replicas divide parameters (FSDP) or optimizer states (ZeRO) into; 1: each holds all."""
        if self.shard:
            return self.fsdp_shards or self.mesh.data
        return self.mesh.data if self.zero else 1

    @property
    def gathers_once(self) -> bool:
        """Whether FSDP gathers parameters once per step, not for each micro-batch."""
        is_default = self.fsdp_gather == "auto" and self.mesh.pipeline > 1
        return self.shard and self.training and (self.fsdp_gather == "step" or is_default)

    @property
    def scatters_every_microbatch(self) -> bool:
        """Whether gradients are reduce-scattered in each micro-batch: ZeRO-2, and FSDP in a pipeline that gathers in
        each."""
        is_sharded = self.shard and self.num_stages > 1 and not self.gathers_once
        return self.training and (self.zero == 2 or is_sharded)

    @property
    def resolved_placement(self) -> Placement:
        """The placement, with auto replaced by the default of the policy or the schedule."""
        if self.placement != "auto":
            return self.placement
        if self.split == "client-server" and self.mesh.pipeline > 1:
            return "client-server"
        rule = SCHEDULES.get(self.schedule)
        return rule.placement if rule else "in-order"

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
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
        """For each stage, the pipeline index of the worker that holds it."""
        return PLACEMENTS[self.resolved_placement](self.num_stages, self.mesh.pipeline)

    def stages_of(self, pipeline: int) -> tuple[int, ...]:
        """Return the stages held by the worker at a pipeline index."""
        return tuple(stage for stage, worker in enumerate(self.stage_workers) if worker == pipeline)

    def codec_of(self, cut: int, *, backward: bool = False) -> str:
        """Return the codec of a cut's activations, or of their gradients."""
        codec = self.codec if not backward or self.codec_backward is None else self.codec_backward
        return codec if isinstance(codec, str) else codec[cut]

    @property
    def has_codecs(self) -> bool:
        """Whether any cut has a codec."""
        cuts = range(self.num_stages - 1)
        return any(self.codec_of(cut, backward=backward) != "none" for cut in cuts for backward in (False, True))

    @property
    def recomputed_units(self) -> tuple[str, ...]:
        """The units that are recomputed one by one; empty if `recompute` is about stages."""
        return tuple(entry for entry in self._named_units if not entry.endswith(OF_ATTENTION))

    @property
    def attention_units(self) -> tuple[str, ...]:
        """The units named in `recompute` of which attention alone is recomputed: "layers.0:attention"."""
        return tuple(entry.removesuffix(OF_ATTENTION) for entry in self._named_units if entry.endswith(OF_ATTENTION))

    @property
    def _named_units(self) -> tuple[str, ...]:
        entries = self.recompute if isinstance(self.recompute, tuple) else ()
        return tuple(entry for entry in entries if isinstance(entry, str))

    def recomputes(self, stage: int) -> bool:
        """Whether a stage is recomputed as a whole, for all micro-batches or all but the last."""
        if isinstance(self.recompute, tuple):
            return not self._named_units and bool(self.recompute[stage])
        return self.recompute in ("always", "except-last")
