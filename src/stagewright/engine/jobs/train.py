"""Train a model on a task under a plan: start and resume a run, and what each worker does.

The loop itself is in ``training_loop``.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stagewright.engine.jobs.training_loop import TrainingLoop, require_same_training, training_settings
from stagewright.engine.launch.launcher import launch
from stagewright.engine.parallel.model import load_model, move_batch
from stagewright.engine.parallel.resolve import (
    check_worker_plan as check_worker_plan,  # called by the worker
    resolve_plan,
)
from stagewright.engine.parallel.trainer import Trainer
from stagewright.engine.state.checkpoint import Checkpoint, latest
from stagewright.engine.worker.clock import write_clock
from stagewright.engine.worker.context import WorkerContext
from stagewright.engine.worker.faults import activity
from stagewright.engine.worker.watchdog import HANG_S
from stagewright.engine.worker.worker import TRAINING_JOB
from stagewright.errors import StagewrightError, UsageError
from stagewright.files.atomic import save_text
from stagewright.runs.result import RunResult, TrainingHistory
from stagewright.runs.run_folder import RunFolder
from stagewright.spec.plan import Plan
from stagewright.zoo.model import Batch, Model

if TYPE_CHECKING:
    from stagewright.zoo.tasks.samples import Samples
    from stagewright.zoo.tasks.task import Task

_OPTIONS = "training.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """Options of a training run that are not in its plan; saved in the run folder."""

    data_dir: str | None = None
    """Folder of parquet files; default: STAGEWRIGHT_DATA."""
    tokenizer: str | None = None
    """Folder with tokenizer.json; default: the one that came with the weights."""
    checkpoint: str | None = None
    """Checkpoint to resume from."""
    export: str | None = None
    """Folder for the trained weights as safetensors."""
    keep: int = 2
    """Number of checkpoints to keep."""


def run_training(plan: Plan, context: WorkerContext, run_folder: RunFolder) -> None:
    """Run training on this worker."""
    options = read_options(run_folder)
    if plan.task is None:
        raise UsageError(f'{run_folder.path / "plan.toml"} has no task to train; add a line like task = "digits"')
    write_clock(context, run_folder.worker(context.rank))
    # A job that was requeued, or restarted by torchrun, continues in its folder.
    checkpoint = latest(run_folder.path / "checkpoints") or options.checkpoint
    activity.begin("load model")
    model, task = load_training_model(plan, context, options, checkpoint)
    trainer = Trainer(plan, model, context, write_plan=run_folder.write_plan)
    activity.begin("read samples")
    loop = TrainingLoop(plan, task, trainer, run_folder, num_checkpoints=options.keep)
    if checkpoint is not None:
        loop.resume(Path(checkpoint))
    loop.run()
    if options.export is not None:
        trainer.export(options.export)


def load_training_model(
    plan: Plan, context: WorkerContext, options: TrainingOptions, checkpoint: Path | str | None = None
) -> tuple[Model, Task]:
    """Load the model of a training run with its task's samples as example batch, and the task.

    Each worker reads its part of the weights from files, if they come from a folder or a checkpoint.
    """
    from stagewright.zoo.tasks.task import load_task

    assert plan.task is not None
    folder = Path(checkpoint) / "model" if checkpoint is not None else None
    model = load_model(plan, context, hollow=True, checkpoint=folder)
    task = load_task(plan.task, model, data_dir=options.data_dir, tokenizer=options.tokenizer)
    return with_samples(replace(model, loss=task.loss), task.dataset(task.splits[0]), context.torch_device), task


def with_samples(model: Model, samples: Samples, device: torch.device) -> Model:
    """Use a task's samples as the model's example batch: sentences have masks and token types."""

    def example(size: int) -> Batch:
        return move_batch(samples.batch([index % len(samples) for index in range(size)]), device)

    first = example(model.batch_size)
    return replace(model, args=first.args, kwargs=dict(first.kwargs), target=first.target, make_example=example)


def train(
    plan: Plan,
    root: str | Path,
    *,
    options: TrainingOptions | None = None,
    progress: Callable[[Mapping[str, Any]], None] | None = None,
    hang_s: float = HANG_S,
    job: str = TRAINING_JOB,
    created: Callable[[RunFolder], None] | None = None,
) -> RunResult:
    """Resolve and train a plan in a new run folder; return the result.

    ``progress`` is called with each new metrics line of the worker with the last stage, ``created`` with the new
    folder.
    """
    if options is not None and options.checkpoint is not None:
        path = Path(options.checkpoint)
        require_same_training(path, Checkpoint.open(path).caller, training_settings(plan))
    plan = resolve_plan(plan)
    folder = RunFolder.create(root, plan)
    if created is not None:
        created(folder)
    write_options(folder, options or TrainingOptions())
    loss_worker = plan.mesh.rank(0, 0, plan.stage_workers[-1])
    lines = _LineReader(folder.worker(loss_worker).path / "metrics.jsonl")

    def poll() -> None:
        for line in lines.read_new():
            if progress is not None:
                progress(line)

    try:
        launch(plan, folder, job=job, hang_s=hang_s, on_poll=poll)
        poll()
        result = merge_results(plan, folder)
    except BaseException as error:
        with suppress(Exception):
            poll()  # report what was written just before the fault
        with suppress(StagewrightError):  # the folder may be gone or the disk full: the fault is reported
            folder.finish_with_error(error)
        raise
    folder.finish("done", result)
    return result


def merge_results(plan: Plan, run_folder: RunFolder) -> RunResult:
    """Read the result of a training run from what worker 0 wrote."""
    content = json.loads((run_folder.worker(0).path / "result.json").read_text(encoding="utf-8"))
    about = {"model": plan.model.name, "task": plan.task, "seed": plan.seed}
    history = TrainingHistory.from_dict({**content, **about})
    return RunResult(
        strategy=plan.mesh.strategy,
        workers=plan.mesh.num_workers,
        run=str(run_folder.path),
        history=history,
        samples_per_s=statistics.median(epoch.samples_per_s for epoch in history.epochs),
    )


class _LineReader:
    """Reads new lines of a growing JSON-lines file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read_new(self) -> Iterator[dict[str, Any]]:
        """Yield the lines completed since the last call."""
        if not self._path.is_file():
            return
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            content = file.read()
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            yield json.loads(line)


def find_checkpoint(root: str | Path, plan: Plan) -> Path | None:
    """Return the last checkpoint of the newest run under ``root`` with the same model, task, batch and seed."""
    root = Path(root)
    for folder in sorted(root.iterdir(), key=lambda path: path.name, reverse=True) if root.is_dir() else ():
        path = latest(folder / "checkpoints")
        if path is None:
            continue
        try:
            other = RunFolder.open(folder).plan()
            saved = Checkpoint.open(path).content
        except StagewrightError:
            continue
        matches = (other.model.name, other.task, other.batch) == (plan.model.name, plan.task, plan.batch)
        if matches and saved.get("seed") == plan.seed:
            return path
    return None


def write_options(run_folder: RunFolder, options: TrainingOptions) -> None:
    """Save the options for the workers."""
    save_text(options_to_json(options), options_file(run_folder))


def options_to_json(options: TrainingOptions) -> str:
    """Return the content of the options' file."""
    return json.dumps(asdict(options), indent=2) + "\n"


def options_file(run_folder: RunFolder) -> Path:
    """Return the path of the options in a run folder."""
    return run_folder.path / _OPTIONS


def read_options(run_folder: RunFolder) -> TrainingOptions:
    path = options_file(run_folder)
    if not path.is_file():
        return TrainingOptions()  # started with torchrun, not by the launcher
    return TrainingOptions(**json.loads(path.read_text(encoding="utf-8")))
