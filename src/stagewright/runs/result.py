"""The result of a run: one value, written once by the engine and read by everyone else.

    engine ─► RunResult ─┬─► result.json of the run folder (with ``status`` and ``ended``)
                         └─► rows of ``stagewright compare --json``

A run is one of three kinds: timed steps of one batch (``is_timed``), training on a task (``history``), or a plan that
was refused or failed (``error``). Fields of the other kinds keep their defaults and are not written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from stagewright.errors import UsageError
from stagewright.files.json_values import from_json, to_json
from stagewright.quantity import format_bytes

if TYPE_CHECKING:
    from stagewright.spec.plan import Plan
from stagewright.spec.unequal_devices import given_speeds

Status: TypeAlias = Literal["done", "failed", "refused", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """Relative errors of a plan against the single-device baseline."""

    equal: bool
    """Whether every error is within its tolerance."""
    tolerance: float
    """Allowed relative error; with rounding sensitivity, the largest that any tensor needed."""
    loss: float
    outputs: float
    """Largest relative error of a model output."""
    gradients: float
    """Largest relative error of a gradient; 0 for inference."""
    buffers: float
    worst: str
    """Name of the value with the largest error on any worker."""
    updates: float = 0.0
    """Largest relative error of what the optimizer step changes; 0 for inference."""
    float64_error: float | None = None
    """Largest relative error of the step in float64, which decided ``equal``; None where float32 decided."""
    undecided: str | None = None
    """Why the step could not be repeated in float64, although rounding may explain the error; None otherwise."""
    codecs: tuple[str, ...] = ()
    """Codecs of the plan's links, which the baseline applied at the same cuts."""
    streamed: bool = False
    """Whether the baseline ran unit by unit, because the model is too large to be held whole."""

    @property
    def errors(self) -> tuple[float, ...]:
        """All relative errors."""
        return self.loss, self.gradients, self.outputs, self.buffers, self.updates

    @property
    def max_error(self) -> float:
        """The largest relative error; NaN where any is NaN."""
        return math.nan if any(math.isnan(error) for error in self.errors) else max(self.errors)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeBatchLoss:
    """The loss of a batch in one piece, compared with the loss over the plan's micro-batches."""

    loss: float
    """Loss of the undivided batch."""
    loss_of_pieces: float
    """Mean over the plan's micro-batches, weighted by samples."""
    pieces: int
    """Number of micro-batches over all replicas."""
    samples: int
    """Samples in the largest micro-batch."""
    difference: float
    """Difference of the two losses, relative to the larger."""
    depends: bool
    """Whether the difference exceeds rounding: the loss depends on which samples share a batch."""
    without_dropout: bool
    """Whether both were computed without dropout, whose masks differ between micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """What ``torch.compile`` did in a run, over all workers."""

    mode: str
    """What was compiled: stages or units."""
    reason: str = ""
    """Why units were compiled although the plan says stages."""
    graphs: int = 0
    """Compiled graphs."""
    graph_breaks: int = 0
    """Places where a forward leaves its compiled graph."""
    break_reasons: tuple[str, ...] = ()
    """The most frequent reasons of graph breaks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of a worker's tensors at one moment, by category."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """Saved for backward; in inference, all intermediate results that are still referenced."""
    buffers: int = 0
    other: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(asdict(self).values())

    def __str__(self) -> str:
        """List the categories, largest first: ``activations 1.70 GiB, parameters 420 MiB``."""
        sizes = sorted(asdict(self).items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes if size) or "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochResult:
    """One epoch of a training run."""

    epoch: int
    step: int
    """Steps done when it ended."""
    training_loss: float
    evaluation_loss: float
    score: float
    """The task's metric on the evaluation split."""
    samples_per_s: float
    evaluation_s: float = 0.0

    def to_dict(self, metric: str) -> dict[str, Any]:
        """The epoch with its score under the metric's name, as metrics.jsonl and result.json have it."""
        return {metric if name == "score" else name: value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], metric: str) -> EpochResult:
        if not isinstance(content, Mapping) or metric not in content:
            raise ValueError(f"an epoch has no {metric}")
        return from_json(cls, {**content, "score": content[metric]})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingHistory:
    """What a training run learned, epoch by epoch."""

    metric: str
    """Name of the task's metric, such as accuracy."""
    epochs: tuple[EpochResult, ...]
    steps: int = 0
    model: str | None = None
    task: str | None = None
    seed: int | None = None

    @property
    def score(self) -> float:
        """The metric after the last epoch."""
        return self.epochs[-1].score

    def to_dict(self) -> dict[str, Any]:
        """Keys of result.json; the last score is repeated under the metric's name."""
        written = {name: value for name in ("model", "task", "seed") if (value := getattr(self, name)) is not None}
        epochs = [epoch.to_dict(self.metric) for epoch in self.epochs]
        last = {self.metric: self.score} if self.epochs else {}
        return {"epochs": epochs, "metric": self.metric, "steps": self.steps, **written, **last}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> TrainingHistory:
        metric, rows = content.get("metric"), content.get("epochs")
        if not isinstance(metric, str) or not isinstance(rows, list | tuple):
            raise ValueError("a history needs epochs and the name of their metric")
        epochs = [EpochResult.from_dict(row, metric) for row in rows]
        rest = {name: content[name] for name in ("steps", "model", "task", "seed") if name in content}
        return from_json(cls, {"metric": metric, "epochs": [asdict(epoch) for epoch in epochs], **rest})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of one run, or of a plan that could not be run."""

    status: Status = "done"
    """done, failed, refused (the request is impossible) or interrupted."""
    ended: str | None = None
    """When the run ended, in ISO 8601."""

    strategy: str | None = None
    """serial, data, tensor, pipeline, or several with ×."""
    shard: bool = False
    """Whether replicas use FSDP."""
    fsdp_shards: int | None = None
    """Replicas among which HSDP shards parameters; null: all."""
    fsdp_gather: str = "auto"
    """How often FSDP gathers parameters: step, microbatch, or auto."""
    zero: int = 0
    """ZeRO stage of replicas that hold all parameters: 1, 2, or 0 for none."""
    vocab_parallel: bool = False
    """Whether tensor parallel workers divide the vocabulary."""
    sequence_parallel: bool = False
    """Whether tensor parallel workers divide the sequence between their divided layers."""
    optimizer_in_backward: bool = False
    """Whether parameters are stepped in backward."""
    cuda_graphs: bool = False
    """Whether stages run as CUDA graphs."""
    speeds: tuple[float, ...] = ()
    """Relative speed of each worker's device, where shares and stages follow them; empty: all alike."""
    workers: int = 0
    batch: int = 0
    """Samples in a step, over all workers."""
    microbatches: int = 0
    schedule: str | None = None
    stages: int = 0
    cuts: tuple[str, ...] = ()
    training: bool = False
    """Forward and backward, or forward only."""

    samples_per_s: float = 0.0
    """Median over timed steps, or over epochs."""
    samples_per_s_spread: float = 0.0
    """Interquartile range over timed steps."""
    latency_s: float = 0.0
    """Median time of a step; 0 where no step was timed."""
    equal: bool | None = None
    """Whether the plan passed the parity check."""
    parity: ParityReport | None = None
    loss_source: str | None = None
    """Whose loss was used: the model's, the task's or a stand-in."""
    whole_batch: WholeBatchLoss | None = None
    compiled: CompileReport | None = None
    """What was compiled; None without compilation."""
    replicated: str = ""
    """Why tensor parallel workers all compute some layers, which can't be split; "" if there are none."""
    peak_memory_bytes: tuple[int, ...] = ()
    """Peak memory of each worker."""
    process_peak_bytes: tuple[int | None, ...] = ()
    """Peak resident memory of each worker's process; None where the system does not report it."""
    memory: tuple[MemoryUse, ...] = ()
    """Peak of each worker by category."""
    link_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes that a step sends over each cut."""
    collective_bytes: tuple[Mapping[str, int], ...] = ()
    """Bytes that each worker passes to the collectives of each axis in a step."""
    bound: float = 1.0
    """Upper bound of the speed-up: number of workers, less the pipeline bubble."""
    run: str | None = None
    """The run folder."""

    is_compared: bool = False
    """Whether the run was compared with a baseline: it has the three fields below."""
    speedup: float | None = None
    """Over the baseline; None where the plan did not pass the parity check or there is no baseline."""
    share_of_bound: float | None = None
    speedups: tuple[float, ...] | None = None
    """Speed-up of each round; None with a single round."""

    refused: bool = False
    """Whether the plan is impossible (UsageError), as opposed to failed."""
    error: str | None = None
    history: TrainingHistory | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other keys: those of user-defined jobs and of other versions."""

    @property
    def is_timed(self) -> bool:
        """Whether steps of one batch were timed."""
        return self.status == "done" and self.latency_s > 0

    @property
    def relative_spread(self) -> float:
        """Half of the interquartile range, relative to the throughput."""
        return 0.5 * self.samples_per_s_spread / self.samples_per_s

    @property
    def max_memory_bytes(self) -> int:
        """Peak memory of the worker that needs most."""
        return max(self.peak_memory_bytes)

    @property
    def axis_bytes(self) -> dict[str, int]:
        """Bytes passed to the collectives of each axis, over all workers."""
        axes = dict.fromkeys((axis for worker in self.collective_bytes for axis in worker), 0)
        return {axis: sum(int(worker.get(axis, 0)) for worker in self.collective_bytes) for axis in axes}

    @property
    def sent_bytes(self) -> int:
        """Bytes that a step passes to links and collectives, over all workers."""
        return sum(self.link_bytes.values()) + sum(self.axis_bytes.values())

    @classmethod
    def of_plan(cls, plan: Plan, **values: Any) -> RunResult:
        """A result with the plan's strategy, batch and schedule."""
        about = {
            "strategy": plan.mesh.strategy,
            "shard": plan.shard,
            "fsdp_shards": plan.fsdp_shards,
            "fsdp_gather": plan.fsdp_gather,
            "zero": plan.zero,
            "vocab_parallel": plan.vocab_parallel,
            "sequence_parallel": plan.sequence_parallel,
            "optimizer_in_backward": plan.optimizer_in_backward,
            "cuda_graphs": plan.cuda_graphs,
            "speeds": given_speeds(plan),
            "workers": plan.mesh.num_workers,
            "batch": plan.batch,
            "microbatches": plan.microbatches,
            "schedule": plan.schedule if plan.mesh.pipeline > 1 else None,
        }
        return cls(**{**about, **values})

    @classmethod
    def of_failure(cls, plan: Plan, error: BaseException) -> RunResult:
        """The result of a plan that was refused (UsageError) or failed."""
        refused = isinstance(error, UsageError)
        return cls.of_plan(plan, status="refused" if refused else "failed", refused=refused, error=str(error))

    def to_dict(self) -> dict[str, Any]:
        """JSON keys of a row, without ``status`` and ``ended``."""
        required: set[str] = set()
        if self.is_timed:
            required |= {*_PLAN_KEYS, *_TIMED_KEYS}
        if self.is_compared:
            required |= {"speedup", "share_of_bound"}
        if self.error is not None and self.strategy is not None:
            required |= {*_PLAN_KEYS, "refused", "equal", "speedup"}
        written = {}
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if name in required or value != default:
                written[_KEYS.get(name, name)] = to_json(value)
        if self.history is not None:
            written |= self.history.to_dict()
        return written | dict(self.extra)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RunResult:
        """Read a row or a result.json, also of older versions; missing keys take their defaults."""
        names = {_KEYS.get(name, name): name for name in (*_DEFAULTS, "status", "ended")}
        values = {names[key]: value for key, value in content.items() if key in names}
        history = TrainingHistory.from_dict(content) if "epochs" in content else None
        own = set(names) | (set(history.to_dict()) if history is not None else set())
        result = from_json(cls, {**values, "is_compared": "share_of_bound" in content})
        if not result.bound > 0:
            raise ValueError(f"the bound of the speed-up is {result.bound}, not above 0")
        if result.samples_per_s_spread and not result.samples_per_s > 0:
            raise ValueError(f"{result.samples_per_s} samples/s can't have a spread")
        for cut in result.link_bytes:
            if not (cut.isascii() and cut.isdigit()):
                raise ValueError(f"{cut!r} is not the number of a cut")
        extra = {key: value for key, value in content.items() if key not in own}
        return replace(result, history=history, extra=extra)


_PLAN_KEYS = (
    *("strategy", "shard", "fsdp_shards", "fsdp_gather", "zero", "workers", "batch", "microbatches", "schedule"),
)
_TIMED_KEYS = (
    *("stages", "cuts", "training", "samples_per_s", "samples_per_s_spread", "latency_s", "equal", "parity"),
    *("loss_source", "whole_batch", "peak_memory_bytes", "process_peak_bytes", "memory", "link_bytes"),
    *("collective_bytes", "bound", "run"),
)
_KEYS = {"parity": "equality"}  # field -> JSON key, where they differ
_NOT_WRITTEN = ("status", "ended", "is_compared", "history", "extra")
_DEFAULTS = {
    item.name: getattr(RunResult(), item.name) for item in fields(RunResult) if item.name not in _NOT_WRITTEN
}  # of fields that are written, in the order of the file
