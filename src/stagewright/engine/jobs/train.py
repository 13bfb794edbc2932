"""Train a model on a task under a plan: what every worker does, and how a run of it is started and resumed.

    epoch e: samples shuffled by (seed, e) ─► batches of the plan's size, the last one smaller ─► step, step, … ─►
    evaluation on the other split ─► next epoch;    a checkpoint every so many steps and at the end

Every worker goes through the same batches in the same order whatever the plan, so losses are serial's. A checkpoint
holds the counters and the epoch's sums too: a resumed run goes on as if nothing had happened, under another plan too.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from stagewright.engine.jobs.measure import load_model
from stagewright.engine.launch.launcher import launch
from stagewright.engine.parallel.replica import on_device
from stagewright.engine.parallel.resolve import resolve_plan
from stagewright.engine.parallel.trainer import Trainer
from stagewright.engine.state.checkpoint import Checkpoint, checkpoint_name, latest, prune
from stagewright.engine.worker.clock import write_clock
from stagewright.engine.worker.context import WorkerContext
from stagewright.engine.worker.faults import activity
from stagewright.engine.worker.memory import held_bytes
from stagewright.engine.worker.recorder import recorder
from stagewright.engine.worker.watchdog import HANG_S
from stagewright.errors import StagewrightError, UsageError
from stagewright.files.atomic import save_text
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan
from stagewright.zoo.model import Batch, Model

if TYPE_CHECKING:
    from stagewright.zoo.tasks.samples import Samples
    from stagewright.zoo.tasks.task import Task

__all__ = [
    "JOB",
    "Progress",
    "TrainingOptions",
    "find_checkpoint",
    "load_training_model",
    "loss_worker",
    "options_file",
    "run_training",
    "train",
    "with_samples",
    "write_options",
]

JOB = "stagewright.engine.jobs.train:run_training"
_OPTIONS = "training.json"
RECORDED_STEPS = 50  # the last ones of a run: events of a long one would fill the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """What a training run needs beside its plan; kept in its folder."""

    data_dir: str | None = None
    """A folder of parquet files; None: STAGEWRIGHT_DATA."""
    tokenizer: str | None = None
    """A folder with tokenizer.json; None: the one that came with the weights."""
    checkpoint: str | None = None
    """The checkpoint to go on from."""
    export: str | None = None
    """A folder for the trained weights as safetensors."""
    keep: int = 2
    """How many of its checkpoints a run keeps."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far training is; saved with each checkpoint."""

    step: int = 0
    """Steps done."""
    samples: int = 0
    """Samples of the running epoch that were trained on."""
    loss_sum: float = 0.0
    """Sum of their losses."""
    seconds: float = 0.0
    """Seconds spent in the running epoch's steps."""
    epochs: list[dict[str, Any]] = field(default_factory=list)
    """What came of each epoch."""


def run_training(plan: Plan, context: WorkerContext, run_folder: RunFolder) -> None:
    """This worker's part of a training run."""
    from stagewright.zoo.tasks.task import load_task

    options = _read_options(run_folder)
    if plan.task is None:
        raise UsageError(f'{run_folder.path / "plan.toml"} names no task to train; add a line like task = "digits"')
    write_clock(context, run_folder.worker(context.rank))
    activity.begin("load model")
    model = load_model(plan, context)
    task = load_task(plan.task, model, data_dir=options.data_dir, tokenizer=options.tokenizer)
    trainer = Trainer(plan, with_samples(model, task.dataset(task.splits[0]), context.torch_device), context)
    if context.rank == 0 and trainer.plan != plan:
        run_folder.write_plan(trainer.plan)  # with the cuts and codecs that were chosen here
    activity.begin("read samples")
    training = _Training(plan, task, trainer, options, run_folder)
    if options.checkpoint is not None:
        training.resume(Path(options.checkpoint))
    training.run()
    if options.export is not None:
        trainer.export(options.export)


def load_training_model(plan: Plan, context: WorkerContext, run_folder: RunFolder) -> Model:
    """The model of a training run with its task's samples, as the run itself has it."""
    from stagewright.zoo.tasks.task import load_task

    assert plan.task is not None
    options = _read_options(run_folder)
    model = load_model(plan, context)
    task = load_task(plan.task, model, data_dir=options.data_dir, tokenizer=options.tokenizer)
    return with_samples(model, task.dataset(task.splits[0]), context.torch_device)


def with_samples(model: Model, samples: Samples, place: torch.device) -> Model:
    """The model with a task's own samples as its example: sentences come with masks and token types."""

    def example(size: int) -> Batch:
        return on_device(samples.batch([at % len(samples) for at in range(size)]), place)

    first = example(model.batch_size)
    return replace(model, args=first.args, kwargs=dict(first.kwargs), target=first.target, make_example=example)


class _Training:
    """One worker's loop."""

    def __init__(
        self, plan: Plan, task: Task, trainer: Trainer, options: TrainingOptions, run_folder: RunFolder
    ) -> None:
        self.plan, self.task, self.trainer, self.options = plan, task, trainer, options
        self.folder = run_folder.worker(trainer.context.rank)
        self.checkpoints = run_folder.path / "checkpoints"
        self.samples = task.dataset(task.splits[0])
        self.judged_by = task.dataset("evaluation")
        self.per_epoch = math.ceil(len(self.samples) / plan.batch)
        self.total = plan.steps if plan.epochs is None else plan.epochs * self.per_epoch
        self.progress = Progress()
        self.steps_here = 0
        self._order: tuple[int, Any] = (-1, None)

    @property
    def trained(self) -> dict[str, Any]:
        """What must be the same for a run to go on as if it had not been broken."""
        return {**_trained(self.plan), "samples": len(self.samples)}

    def resume(self, path: Path) -> None:
        """Take parameters, optimiser and counters from a checkpoint."""
        # The plan's learning rate counts: it is the same as the checkpoint's, or was changed on purpose.
        saved = self.trainer.load(path, optimizer_options=False)
        _refuse_other(path, saved, self.trained)
        self.progress = Progress(**saved["progress"])

    def run(self) -> None:
        """Every step that is left."""
        recorder.open(self.trainer.context.torch_device, most_steps=RECORDED_STEPS)
        with self.folder:
            self.folder.append_metrics(kind="begin", step=self.progress.step, total=self.total, batches=self.per_epoch)
            while self.progress.step < self.total:
                self.step()
                if self.progress.step % self.per_epoch == 0 or self.progress.step == self.total:
                    self.end_epoch()
                every = self.plan.checkpoint_every
                if every is not None and (self.progress.step % every == 0 or self.progress.step == self.total):
                    self.save()
            recorder.close()
            write_clock(self.trainer.context, self.folder)  # again: clocks of machines drift apart in hours
            self.folder.write_events(recorder.rows())
            self.folder.write_memory(self.trainer.replica.memory.rows)
            if self.trainer.context.rank == 0:
                result = {"epochs": self.progress.epochs, "metric": self.task.metric_name, "steps": self.progress.step}
                save_text(json.dumps(result, indent=2) + "\n", self.folder.path / "result.json")

    def step(self) -> None:
        progress, size = self.progress, self.plan.batch
        epoch, place = divmod(progress.step, self.per_epoch)
        start = time.perf_counter()
        activity.begin("read batch", step=progress.step)
        with self.observed():
            indices = self.order(epoch)[place * size : (place + 1) * size]
            result = self.trainer.step(self.samples.batch(indices.tolist()))
        took = time.perf_counter() - start
        progress.step = result.step
        progress.samples += result.num_samples
        progress.loss_sum += result.loss * result.num_samples
        progress.seconds += took
        self.folder.append_metrics(
            kind="step",
            step=result.step,
            epoch=epoch + 1,
            loss=result.loss,
            samples=result.num_samples,
            seconds=took,
            waited_s=result.waited_s,
            memory_bytes=held_bytes(self.trainer.context.torch_device),
            **({} if result.gradient_norm is None else {"gradient_norm": result.gradient_norm}),
        )

    @contextmanager
    def observed(self) -> Iterator[None]:
        """A step whose events are recorded; of the second one the memory is counted instead, which slows it down."""
        self.steps_here += 1
        if self.steps_here == 2:
            with self.trainer.replica.tracked():
                self.trainer.replica.memory.begin_rows()
                yield
        else:
            with recorder.step(self.progress.step):
                yield

    def end_epoch(self) -> None:
        progress = self.progress
        start = time.perf_counter()
        loss, metric = self.evaluate(self.judged_by)
        row = {
            "epoch": math.ceil(progress.step / self.per_epoch),
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
        """Loss and metric over a whole split, the same on every worker."""
        total = 0.0
        predicted, true = [], []
        for batch in samples.batches(self.plan.batch):
            result = self.trainer.evaluate(batch)
            total += result.loss * result.num_samples
            for output, target in zip(result.outputs, result.targets, strict=True):
                one, other = self.task.predictions(output, target)
                predicted.append(one)
                true.append(other)
        context = self.trainer.context
        own = np.zeros((2, 0), dtype=np.int64)
        if predicted and context.tensor == 0:
            own = np.stack([np.concatenate(predicted), np.concatenate(true)]).astype(np.int64)
        every = _gathered(torch.from_numpy(own), context)
        return total / len(samples), self.task.metric(every[0].numpy(), every[1].numpy())

    def save(self) -> None:
        path = self.checkpoints / checkpoint_name(self.progress.step)
        self.trainer.save(path, content={"trained": self.trained, "progress": asdict(self.progress)})
        if self.trainer.context.rank == 0:
            prune(self.checkpoints, self.options.keep)

    def order(self, epoch: int) -> Any:
        """The samples of an epoch, shuffled by seed and epoch alone."""
        if self._order[0] != epoch:
            order = np.random.default_rng([self.plan.seed, epoch]).permutation(len(self.samples))
            self._order = (epoch, order)
        return self._order[1]


def _gathered(own: torch.Tensor, context: WorkerContext) -> torch.Tensor:
    """The columns of every worker, side by side, in the order of ranks."""
    count = context.mesh.num_workers
    if count == 1:
        return own
    place = context.torch_device
    sizes = [torch.zeros(1, dtype=torch.int64, device=place) for _ in range(count)]
    dist.all_gather(sizes, torch.tensor([own.shape[1]], device=place))
    lengths = [int(one) for one in sizes]
    padded = torch.zeros((2, max(lengths)), dtype=torch.int64, device=place)
    padded[:, : own.shape[1]] = own
    found = [torch.empty_like(padded) for _ in range(count)]
    dist.all_gather(found, padded)
    return torch.cat([one[:, :length] for one, length in zip(found, lengths, strict=True)], dim=1).cpu()


def train(
    plan: Plan,
    root: str | Path,
    *,
    options: TrainingOptions | None = None,
    progress: Callable[[Mapping[str, Any]], None] | None = None,
    hang_s: float = HANG_S,
    job: str = JOB,
) -> dict[str, Any]:
    """Resolve and train a plan in a new run folder; its result.

    ``progress`` is called with each line that the worker with the last stage adds to its metrics.
    """
    if options is not None and options.checkpoint is not None:
        path = Path(options.checkpoint)
        _refuse_other(path, Checkpoint.open(path).content["caller"], _trained(plan))
    plan = resolve_plan(plan)
    folder = RunFolder.create(root, plan)
    write_options(folder, options or TrainingOptions())
    lines = _Lines(folder.worker(loss_worker(plan)).path / "metrics.jsonl")

    def poll() -> None:
        for line in lines.new():
            if progress is not None:
                progress(line)

    try:
        launch(plan, folder, job=job, hang_s=hang_s, on_poll=poll)
        poll()
        result = merge_results(plan, folder)
    except KeyboardInterrupt:
        folder.finish("interrupted")
        raise
    except BaseException as error:
        with suppress(Exception):
            poll()  # what was written just before a fault
        folder.give_up(error)
        raise
    folder.finish("done", result)
    return result


def merge_results(plan: Plan, run_folder: RunFolder) -> dict[str, Any]:
    """One result of a run, from what worker 0 wrote."""
    result: dict[str, Any] = json.loads((run_folder.worker(0).path / "result.json").read_text(encoding="utf-8"))
    return result | {
        "model": plan.model.name,
        "task": plan.task,
        "seed": plan.seed,
        "strategy": plan.mesh.strategy,
        "workers": plan.mesh.num_workers,
        "run": str(run_folder.path),
        result["metric"]: result["epochs"][-1][result["metric"]],
        "samples_per_s": statistics.median(one["samples_per_s"] for one in result["epochs"]),
    }


def _trained(plan: Plan) -> dict[str, Any]:
    return {"model": plan.model.name, "task": plan.task, "batch": plan.batch, "seed": plan.seed}


def _refuse_other(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """UsageError where a checkpoint was made by training something else."""
    there = saved.get("trained")
    if there is None or "progress" not in saved:
        raise UsageError(f"the checkpoint {path} was not made by `stagewright train`, so it can't be gone on from")
    for name, value in wanted.items():
        if there.get(name) != value:
            raise UsageError(f"the checkpoint {path} was made with {name} = {there.get(name)!r}, not {value!r}")


class _Lines:
    """Reads what is added to a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """The lines that have become whole since the last time."""
        if not self._path.is_file():
            return
        with open(self._path, "rb") as file:
            file.seek(self._read)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)


def loss_worker(plan: Plan) -> int:
    """The rank of the worker that computes the loss of replica 0."""
    return plan.mesh.rank(0, 0, plan.stage_workers[-1])


def find_checkpoint(root: str | Path, plan: Plan) -> Path | None:
    """The last checkpoint of the newest run under ``root`` that trained the same: model, task, batch and seed."""
    root = Path(root)
    for one in sorted(root.iterdir(), key=lambda path: path.name, reverse=True) if root.is_dir() else ():
        path = latest(one / "checkpoints")
        if path is None:
            continue
        try:
            other = RunFolder.open(one).plan()
            saved = Checkpoint.open(path).content
        except StagewrightError:
            continue
        same = (other.model.name, other.task, other.batch) == (plan.model.name, plan.task, plan.batch)
        if same and saved["seed"] == plan.seed:
            return path
    return None


def write_options(run_folder: RunFolder, options: TrainingOptions) -> None:
    """Keep the options where the workers find them."""
    save_text(json.dumps(asdict(options), indent=2) + "\n", options_file(run_folder))


def options_file(run_folder: RunFolder) -> Path:
    """Where they are."""
    return run_folder.path / _OPTIONS


def _read_options(run_folder: RunFolder) -> TrainingOptions:
    path = options_file(run_folder)
    if not path.is_file():
        return TrainingOptions()  # started with torchrun, without our launcher
    return TrainingOptions(**json.loads(path.read_text(encoding="utf-8")))
