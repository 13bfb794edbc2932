"""The training loop of one worker.

    epoch e: samples shuffled by (seed, e) ─► batches of the plan's size, the last one smaller ─► step, step, … ─►
    evaluation on the other split ─► next epoch;    a checkpoint every N steps and at the end

Batches and their order are the same under any plan, so losses match the single-device baseline. A replica reads only
its own samples of each. A checkpoint includes the counters and running sums of the epoch: a resumed run continues
exactly where the interrupted one stopped, also under another plan.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from stagewright.engine.batch.splitter import ReplicaShare, share_bounds
from stagewright.engine.jobs.learning_rate import learning_rate
from stagewright.engine.parallel.evaluation import Evaluation
from stagewright.engine.parallel.trainer import Trainer
from stagewright.engine.state.checkpoint import checkpoint_name, prune
from stagewright.engine.worker.broadcast import gather_ragged
from stagewright.engine.worker.clock import write_clock
from stagewright.engine.worker.faults import activity
from stagewright.engine.worker.memory import held_bytes
from stagewright.engine.worker.recorder import recorder
from stagewright.errors import UsageError
from stagewright.files.atomic import save_text
from stagewright.files.json_values import from_json
from stagewright.runs.predictions import Predictions
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan
from stagewright.zoo.model import Batch

if TYPE_CHECKING:
    from stagewright.zoo.tasks.samples import Samples
    from stagewright.zoo.tasks.task import Task

RECORDED_STEPS = 50  # the last ones of a run: events of a long run would fill the memory


@dataclass(slots=True, kw_only=True)
class Progress:
    """Progress of training; saved with each checkpoint."""

    step: int = 0
    samples: int = 0
    """Samples trained on in the current epoch."""
    loss_sum: float = 0.0
    """Sum of their losses."""
    seconds: float = 0.0
    """Time spent in steps of the current epoch."""
    epochs: list[dict[str, Any]] = field(default_factory=list)
    """One row of metrics per finished epoch."""


class TrainingLoop:
    """The training loop of one worker."""

    def __init__(
        self, plan: Plan, task: Task, trainer: Trainer, run_folder: RunFolder, *, num_checkpoints: int
    ) -> None:
        """``num_checkpoints``: how many checkpoints to keep."""
        self.plan, self.task, self.trainer, self.num_checkpoints = plan, task, trainer, num_checkpoints
        self.folder = run_folder.worker(trainer.context.rank)
        self.run_path = run_folder.path
        self.checkpoints = run_folder.path / "checkpoints"
        self.samples = task.dataset(task.splits[0])
        self.evaluation_samples = task.dataset("evaluation")
        self.steps_per_epoch = math.ceil(len(self.samples) / plan.batch)
        self.num_steps = plan.steps if plan.epochs is None else plan.epochs * self.steps_per_epoch
        self.progress = Progress()
        self.steps_in_run = 0
        self.predictions: Predictions | None = None
        """Of the last evaluation, the same on every worker; None before it, or where samples have several classes."""
        self._order: tuple[int, Any] = (-1, None)
        self._reader: tuple[tuple[int, int], Iterator[Batch | ReplicaShare]] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that must be unchanged to resume a run exactly."""
        return {**training_settings(self.plan), "samples": len(self.samples)}

    def resume(self, path: Path) -> None:
        """Load parameters, optimizer states and counters from a checkpoint."""
        # Keep the plan's learning rate: it equals the checkpoint's or was changed on purpose.
        saved = self.trainer.load(path, optimizer_options=False)
        require_same_training(path, saved, self.settings)
        try:
            self.progress = from_json(Progress, saved["progress"])
        except ValueError as error:
            raise UsageError(f"the checkpoint {path} is damaged: progress: {error}") from None

    def run(self) -> None:
        """Run all remaining steps."""
        recorder.open(self.trainer.context.torch_device, most_steps=RECORDED_STEPS)
        with self.folder:
            self.folder.append_metrics(
                kind="begin", step=self.progress.step, total=self.num_steps, batches=self.steps_per_epoch
            )
            while self.progress.step < self.num_steps:
                self.step()
                if self.progress.step % self.steps_per_epoch == 0 or self.progress.step == self.num_steps:
                    self.end_epoch()
                interval = self.plan.checkpoint_every
                if interval is not None and (
                    self.progress.step % interval == 0 or self.progress.step == self.num_steps
                ):
                    self.save()
            recorder.close()
            write_clock(self.trainer.context, self.folder)  # again: clocks of machines drift apart over hours
            self.folder.write_events(recorder.rows())
            self.folder.write_memory(self.trainer.runner.memory.rows)
            if self.trainer.context.rank == 0:
                result = {"epochs": self.progress.epochs, "metric": self.task.metric_name, "steps": self.progress.step}
                save_text(json.dumps(result, indent=2) + "\n", self.folder.path / "result.json")
                if self.predictions is not None:
                    self.predictions.save(self.run_path)

    def step(self) -> None:
        progress = self.progress
        epoch, index = divmod(progress.step, self.steps_per_epoch)
        start = time.perf_counter()
        activity.begin("read batch", step=progress.step)
        with self.observed():
            rate = self.set_learning_rate()
            result = self.trainer.step(self.next_batch(epoch, index))
        elapsed_s = time.perf_counter() - start
        progress.step = result.step
        progress.samples += result.num_samples
        progress.loss_sum += result.loss * result.num_samples
        progress.seconds += elapsed_s
        self.folder.append_metrics(
            kind="step",
            step=result.step,
            epoch=epoch + 1,
            loss=result.loss,
            samples=result.num_samples,
            seconds=elapsed_s,
            waited_s=result.waited_s,
            memory_bytes=held_bytes(self.trainer.context.torch_device),
            **({} if result.gradient_norm is None else {"gradient_norm": result.gradient_norm}),
            **({} if rate is None else {"learning_rate": rate}),
        )

    def set_learning_rate(self) -> float | None:
        """Set the learning rate of this step and return it; None where the plan keeps it constant."""
        spec = self.plan.optimizer
        if spec.lr_schedule == "constant" and not spec.lr_warmup_steps:
            return None
        rate = learning_rate(spec, self.progress.step, self.num_steps)
        for group in self.trainer.optimizer.param_groups if self.trainer.optimizer is not None else ():
            group["lr"] = rate
        return rate

    def next_batch(self, epoch: int, index: int) -> Batch | ReplicaShare:
        """Read this replica's part of a batch; the rest of the epoch is read ahead where the task can."""
        if self._reader is None or self._reader[0] != (epoch, index):
            order, size = self.order(epoch), self.plan.batch
            starts = range(index * size, len(order), size)
            self._reader = (epoch, index), self.read(self.samples, [order[start : start + size] for start in starts])
        self._reader = (epoch, index + 1), self._reader[1]
        return next(self._reader[1])

    def read(self, samples: Samples, batches: Sequence[Any]) -> Iterator[Batch | ReplicaShare]:
        """Yield the batches with these indices; only this replica's samples of each are read."""
        replica, plan = self.trainer.context.data, self.plan
        is_shared = plan.mesh.data > 1
        parts = []
        for indices in batches:  # a batch with fewer samples than replicas is read whole
            bounds = share_bounds(len(indices), plan, replica) if len(indices) >= plan.mesh.data else (0, len(indices))
            parts.append([int(number) for number in indices[slice(*bounds)]])
        for indices, batch in zip(batches, samples.stream(parts), strict=True):
            if is_shared and len(indices) >= plan.mesh.data:
                yield ReplicaShare(batch=batch, replica=replica, num_samples=len(indices))
            else:
                yield batch

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Record the events of a step; for the second step track memory instead, which slows it down."""
        self.steps_in_run += 1
        if self.steps_in_run == 2:
            with self.trainer.runner.memory.tracking():
                self.trainer.runner.memory.begin_rows()
                yield
        else:
            with recorder.step(self.progress.step):
                yield

    def end_epoch(self) -> None:
        progress = self.progress
        start = time.perf_counter()
        activity.begin("evaluate")  # no longer the last step's all-reduce, in which a worker would seem to wait
        loss, metric = self.evaluate(self.evaluation_samples)
        row = {
            "epoch": math.ceil(progress.step / self.steps_per_epoch),
            "step": progress.step,
            "training_loss": progress.loss_sum / progress.samples,
            "evaluation_loss": loss,
            self.task.metric_name: metric,
            "samples_per_s": progress.samples / progress.seconds,
            "evaluation_s": time.perf_counter() - start,
        }
        self.folder.append_metrics(kind="epoch", **row)
        progress.epochs.append(row)
        progress.samples, progress.loss_sum, progress.seconds = 0, 0.0, 0.0

    def evaluate(self, samples: Samples) -> tuple[float, float]:
        """Return loss and metric over a whole split, the same on every worker."""
        total = 0.0
        rows: list[NDArray[np.int64]] = []
        size = self.plan.batch
        order = [range(start, min(start + size, len(samples))) for start in range(0, len(samples), size)]
        for indices, batch in zip(order, self.read(samples, order), strict=True):
            result = self.trainer.evaluate(batch)
            total += result.loss * result.num_samples
            if self.task.metric is not None and result.outputs:
                share = slice(*share_bounds(len(indices), self.plan, self.trainer.context.data))
                rows.append(self._classes(indices[share], result))
        if self.task.metric is None:
            return total / len(samples), total / len(samples)
        context = self.trainer.context
        columns = np.concatenate(rows, axis=1) if rows and context.tensor == 0 else np.zeros((3, 0), dtype=np.int64)
        numbers, labels, predicted = torch.cat(
            gather_ragged(torch.from_numpy(columns), context.torch_device), dim=1
        ).numpy()
        if np.array_equal(np.sort(numbers), np.arange(len(samples))):
            in_order = np.argsort(numbers)
            self.predictions = Predictions(labels=labels[in_order], predicted=predicted[in_order])
        return total / len(samples), self.task.metric(predicted, labels)

    def _classes(self, numbers: Sequence[int], result: Evaluation) -> NDArray[np.int64]:
        """Return the samples' numbers with their true and predicted classes; −1 where a sample has several classes."""
        pairs = [self.task.predictions(*each) for each in zip(result.outputs, result.targets, strict=True)]
        predicted, labels = (np.concatenate(column) for column in zip(*pairs, strict=True))
        known = numbers if len(numbers) == len(labels) else np.full(len(labels), -1)
        return np.stack([known, labels, predicted]).astype(np.int64)

    def save(self) -> None:
        path = self.checkpoints / checkpoint_name(self.progress.step)
        self.trainer.save(path, content={"trained": self.settings, "progress": asdict(self.progress)})
        if self.trainer.context.rank == 0:
            prune(self.checkpoints, self.num_checkpoints)

    def order(self, epoch: int) -> Any:
        """Return the sample order of an epoch, which depends only on seed and epoch."""
        if self._order[0] != epoch:
            order = np.random.default_rng([self.plan.seed, epoch]).permutation(len(self.samples))
            self._order = (epoch, order)
        return self._order[1]


def training_settings(plan: Plan) -> dict[str, Any]:
    """Return the settings that identify a training run."""
    return {"model": plan.model.name, "task": plan.task, "batch": plan.batch, "seed": plan.seed}


def require_same_training(path: Path, saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise if a checkpoint was made by a training run with other settings."""
    settings = saved.get("trained")
    if not isinstance(settings, dict) or not isinstance(saved.get("progress"), dict):
        raise UsageError(f"the checkpoint {path} was not made by `stagewright train`, so it can't be resumed")
    for name, value in expected.items():
        if settings.get(name) != value:
            raise UsageError(f"the checkpoint {path} was made with {name} = {settings.get(name)!r}, not {value!r}")
