"""``sw.train``: train a model on a named task under a plan, one run a seed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from stagewright.api.forecast import search_order
from stagewright.api.inputs import load_plan, parse_devices, split_options
from stagewright.api.metric_log import MetricLog, check_logger
from stagewright.api.progress import SILENT, Progress
from stagewright.display import Displayed
from stagewright.engine.jobs.elastic import train_elastic
from stagewright.engine.jobs.train import TrainingOptions, find_checkpoint
from stagewright.engine.parallel.resolve import check_cuts
from stagewright.engine.state.checkpoint import Checkpoint, latest
from stagewright.engine.worker.watchdog import HANG_S
from stagewright.errors import UsageError
from stagewright.quantity import format_s
from stagewright.runs.result import RunResult, TrainingHistory
from stagewright.runs.run_folder import check_root
from stagewright.spec.local_check import check_on_this_machine
from stagewright.spec.plan import Mesh, ModelSpec, OptimizerSpec, Plan
from stagewright.spec.plan_file import plan_to_table
from stagewright.spec.plan_rules import check_plan
from stagewright.spec.strategy import parse_strategy
from stagewright.zoo import tasks
from stagewright.zoo.tasks import check_task
from stagewright.zoo.tasks.user_task import default_batch
from stagewright.zoo.validation import check_name, has_option

_NOTE_EVERY_S = 5.0
_EPOCH_KEYS = ("kind", "epoch", "step", "training_loss", "evaluation_loss", "samples_per_s", "evaluation_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult(Displayed):
    """Training runs of one plan, one for each seed."""

    plan: Plan
    task: str
    runs: tuple[RunResult, ...]
    """The result of each run, with its history of epochs."""

    @property
    def metric(self) -> str:
        """The name of the task's metric."""
        return self.histories[0].metric

    @property
    def histories(self) -> tuple[TrainingHistory, ...]:
        """Losses and metric of each run, epoch by epoch."""
        return tuple(run.history for run in self.runs if run.history is not None)

    @property
    def mean(self) -> float:
        """The metric after the last epoch, averaged over seeds."""
        return statistics.fmean(history.score for history in self.histories)

    @property
    def spread(self) -> float:
        """Standard deviation of the metric over seeds; 0 for one seed."""
        scores = [history.score for history in self.histories]
        return statistics.stdev(scores) if len(scores) > 1 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of ``stagewright train --json``."""
        return {
            "model": self.plan.model.name,
            "task": self.task,
            "metric": self.metric,
            "mean": self.mean,
            "spread": self.spread,
            "runs": [run.to_dict() for run in self.runs],
        }


def train(
    model: str,
    task: str,
    *,
    plan: Plan | str | Path | None = None,
    devices: int | str | Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    resume: bool = False,
    start: str | Path | None = None,
    save_weights: str | Path | None = None,
    data_dir: str | Path | None = None,
    tokenizer: str | Path | None = None,
    log: str | None = None,
    root: str | Path = "runs",
    hang_s: float = HANG_S,
    max_restarts: int = 0,
    progress: Progress = SILENT,
    **options: Any,
) -> TrainingResult:
    """Train a model on a task, with checkpoints and an evaluation after each epoch.

    Args:
        model: A name from ``stagewright models``, ``hf:ORG/NAME``, or ``package.module:factory``.
        task: A task from ``stagewright models``, or ``package.module:name`` for your own data: a torch ``Dataset`` or
            ``DataLoader``, a Hugging Face dataset, two of them for training and evaluation, or a function that returns
            these.
        plan: A plan, or the path of its file; options given here override it.
        devices: How many GPUs or cores, or their names.
        seeds: One run each; by default the plan's seed.
        resume: Whether to continue from the latest matching checkpoint under `root`.
        start: A checkpoint, or a run that has one, to start from.
        save_weights: A folder for the trained weights, as ``model.safetensors``.
        data_dir: A folder of parquet files.
        tokenizer: A folder with ``tokenizer.json``.
        log: Where to log losses, metric and rates as well: csv (into the run folder), wandb, tensorboard or mlflow.
        root: Where run folders go.
        hang_s: Seconds without progress after which a run is ended.
        max_restarts: How often a run that lost a worker goes on from its last checkpoint by itself.
        progress: Receives notes while it trains.
        options: Options of the plan (``mesh``, which may also be a strategy such as fsdp, ``epochs``, ``batch``,
            ``microbatches`` or ``micro_batch_size``, ``schedule``, ``recompute``, ``shard``, ``fsdp_shards``,
            ``fsdp_gather``, ``zero``, ``vocab_parallel``, ``sequence_parallel``, ``clip``,
            ``checkpoint_every``, …), of the optimizer (``optimizer``, ``learning_rate``, ``momentum``,
            ``weight_decay``, ``lr_schedule``, ``lr_warmup_steps``) and of the model (``image_size``, …).

    Example:
        result = sw.train("digits-vit", "digits", mesh="data=2", epochs=1, batch=256)
        print(result.metric, result.mean)
    """
    check_name(model, options.get("weights"))
    check_root(root)
    if log is not None:
        check_logger(log)
    num_classes = None
    source = tasks.own_data(task)
    if source is None:
        num_classes = tasks.entry(task).num_classes if has_option(model, "num_classes") else None
    elif plan is None and options.get("batch") is None:
        options["batch"] = default_batch(source)
    names = None if devices is None else parse_devices(devices, progress)
    base = _plan(plan, model, options, num_classes, 2 if names is None else len(names))
    if names is not None or not base.devices:
        base = _on_devices(base, names or parse_devices(base.mesh.num_workers, progress))
    chosen = [base.seed] if seeds is None else list(dict.fromkeys(seeds))
    plans = [replace(base, task=task, seed=seed, model=replace(base.model, seed=seed)) for seed in chosen]
    _check(plans, data_dir)
    weights_folder, tokenizer = _check_folders(save_weights, tokenizer)
    ordered = search_order(plans[0], progress)  # the plans differ in their seeds
    plans = [replace(ordered, seed=plan.seed, model=plan.model) for plan in plans]
    begun = _checkpoints(plans, root, resume=resume, start=start)
    runs: list[RunResult] = []
    for seeded, checkpoint in zip(plans, begun, strict=True):
        if resume and checkpoint is None:
            progress.note(f"seed {seeded.seed}: no checkpoint in {root} matches; starting from scratch")
        elif checkpoint is not None:
            progress.note(f"seed {seeded.seed}: resuming from {checkpoint}")
            _warn_about_microbatches(seeded, checkpoint, progress)
        folder = f"seed-{seeded.seed}" if len(plans) > 1 else ""
        settings = TrainingOptions(
            data_dir=None if data_dir is None else str(data_dir),
            tokenizer=None if tokenizer is None else str(tokenizer),
            checkpoint=None if checkpoint is None else str(checkpoint.resolve()),
            export=None if weights_folder is None else str(weights_folder.resolve() / folder),
        )
        runs.append(_run_one(seeded, root, settings, progress, log, hang_s, max_restarts))
    return TrainingResult(plan=base, task=task, runs=tuple(runs))


def _run_one(
    plan: Plan,
    root: str | Path,
    settings: TrainingOptions,
    progress: Progress,
    log: str | None,
    hang_s: float,
    max_restarts: int,
) -> RunResult:
    """Train one seed; report its metric lines and log them, after a restart into the new run folder."""
    report, logs = _reporter(plan, progress), list[MetricLog]()

    def open_log(folder: Path) -> None:
        for opened in logs:
            opened.close()
        logs.clear()
        if log is not None:
            logs.append(MetricLog(log, folder, plan_to_table(plan)))

    def follow(line: Mapping[str, Any]) -> None:
        report(line)
        for opened in logs:
            opened.write(line)

    try:
        return train_elastic(
            plan,
            root,
            options=settings,
            max_restarts=max_restarts,
            hang_s=hang_s,
            progress=follow,
            on_folder=open_log,
            note=progress.note,
        )
    finally:
        for opened in logs:
            opened.close()


def _plan(
    source: Plan | str | Path | None,
    model: str,
    options: Mapping[str, Any],
    num_classes: int | None,
    num_devices: int = 2,
) -> Plan:
    """Return the given plan with the options on top, or a new one from the options."""
    learning = {"optimizer": "name"} | {
        name: name for name in (field.name for field in fields(OptimizerSpec)) if name != "name"
    }
    given = {name: value for name, value in options.items() if value is not None}
    optimizer = {learning[name]: given.pop(name) for name in list(given) if name in learning}
    size = given.pop("micro_batch_size", None)
    about, given = split_options(given)
    if isinstance(given.get("mesh"), str):
        strategy = parse_strategy(given["mesh"], num_devices, given.get("fsdp_shards"))
        given["mesh"], zero = strategy.mesh, strategy.zero
        given |= {"shard": True} if zero == 3 else {"zero": zero} if zero else {}
        given |= {} if strategy.fsdp_shards is None else {"fsdp_shards": strategy.fsdp_shards}
    if size is not None:
        if "microbatches" in given:
            raise UsageError(
                f"microbatches = {given['microbatches']} and micro_batch_size = {size} exclude each other; use one"
            )
        loaded = None if source is None else load_plan(source)
        batch = given.get("batch", 64 if loaded is None else loaded.batch)
        mesh = given.get("mesh", Mesh() if loaded is None else loaded.mesh)
        given["microbatches"] = max(1, -(-batch // (mesh.data * size)))
    if source is None:
        mesh = given.get("mesh", Mesh())
        defaults = {"batch": 64, "epochs": 3, "microbatches": 4 if mesh.pipeline > 1 else 1}
        about = {"num_classes": num_classes, **about}
        spec = OptimizerSpec(**optimizer)
        return Plan(**{**defaults, **given, "model": ModelSpec(name=model, **about), "optimizer": spec})
    plan = load_plan(source)
    if plan.model.name != model:
        where = "the plan" if isinstance(source, Plan) else source
        raise UsageError(
            f"{where} is a plan for {plan.model.name!r}, not for {model!r}; name that model, or leave the plan out"
        )
    if {"mesh", "schedule", "cuts"} & given.keys():  # the file's stages belong to its own mesh
        given = {"cuts": (), "stages": None, "placement": "auto", "actions": (), "devices": (), **given}
    if "microbatches" in given and given["microbatches"] != plan.microbatches:
        given["actions"] = ()
    if plan.epochs is None and "epochs" not in given:
        given["epochs"] = 3
    if plan.model.num_classes is None:
        about = {"num_classes": num_classes, **about}
    return replace(
        plan, **given, model=replace(plan.model, **about), optimizer=replace(plan.optimizer, **optimizer), training=True
    )


def _on_devices(plan: Plan, names: tuple[str, ...]) -> Plan:
    count = plan.mesh.num_workers
    if len(names) < count:
        raise UsageError(f"{plan.mesh} needs {count} devices, but --devices gives {len(names)}; use --devices {count}")
    return replace(plan, devices=names[:count])


def _check(plans: Sequence[Plan], data_dir: str | Path | None) -> None:
    """Refuse what can't be trained on this machine before there is a run; the plans differ in their seeds."""
    for plan in plans:
        check_plan(plan)
    plan = plans[0]
    blueprint = check_on_this_machine(plan)
    check_task(
        str(plan.task),
        plan.model.name,
        plan.model.load() if blueprint is None else blueprint,
        data_dir=None if data_dir is None else Path(data_dir),
    )
    if plan.cuts or plan.recomputed_units or plan.units not in ("auto", "leaf"):
        check_cuts(plan)


def _check_folders(weights: str | Path | None, tokenizer: str | Path | None) -> tuple[Path | None, Path | None]:
    if weights is not None and Path(weights).exists() and not Path(weights).is_dir():
        raise UsageError(f"--save-weights {weights} is a file; name a folder, which is created if it does not exist")
    if tokenizer is not None and not Path(tokenizer).expanduser().is_dir():
        raise UsageError(f"--tokenizer {tokenizer}: there is no such folder; name one that has tokenizer.json")
    return None if weights is None else Path(weights), None if tokenizer is None else Path(tokenizer)


def _checkpoints(
    plans: Sequence[Plan], root: str | Path, *, resume: bool, start: str | Path | None
) -> list[Path | None]:
    """Return the checkpoint that each run starts from."""
    named = None if start is None else _checkpoint_in(Path(start))
    checkpoints = [named or (find_checkpoint(root, plan) if resume else None) for plan in plans]
    if resume and not any(checkpoints):
        plan, seeds = plans[0], " or ".join(str(plan.seed) for plan in plans)
        raise UsageError(
            f"--resume: no run in {root} has a checkpoint of {plan.model.name} on {plan.task} with batch {plan.batch} "
            f"and seed {seeds}; leave --resume out to start from scratch (--checkpoint-every 100 writes checkpoints)"
        )
    return checkpoints


def _checkpoint_in(path: Path) -> Path:
    """Return a checkpoint itself, or the last one of a run."""
    if (path / "index.json").is_file():
        return path
    checkpoint = latest(path / "checkpoints")
    if checkpoint is None:
        raise UsageError(
            f"{path} is neither a checkpoint nor a run that has one; name a run folder that was made with "
            "--checkpoint-every"
        )
    return checkpoint


def _warn_about_microbatches(plan: Plan, checkpoint: Path, progress: Progress) -> None:
    """Warn if the resumed run splits its batches into another number of micro-batches."""
    saved = Checkpoint.open(checkpoint).content
    now = plan.mesh.data * plan.microbatches
    codec = saved.get("codec")
    pieces = codec.get("microbatches") if isinstance(codec, dict) else None
    before = Mesh.parse(str(saved.get("mesh"))).data * pieces if isinstance(pieces, int) else now
    if now != before:
        progress.note(
            f"warning: batches were split into {_count(before)} and are now split into {_count(now)}; dropout, batch "
            "norm and losses that compare samples depend on the micro-batch, so such a model gets other losses than "
            f"an uninterrupted run; to keep them, choose replicas × --microbatches = {before}"
        )


def _count(number: int) -> str:
    return f"{number} micro-batch{'es' if number > 1 else ''}"


def _reporter(plan: Plan, progress: Progress) -> Callable[[Mapping[str, Any]], None]:
    """Report progress from the metric lines of the worker that computes the loss."""
    total, last = 0, time.monotonic()
    done, seconds, samples = 0, 0.0, 0

    def report(line: Mapping[str, Any]) -> None:
        nonlocal total, last, done, seconds, samples
        if line["kind"] == "begin":
            total = line["total"]
            steps = f"{total - line['step']} steps, {line['batches']} an epoch"
            progress.note(f"seed {plan.seed}: {plan.mesh.strategy}, {steps}")
            return
        if line["kind"] == "step":
            done, seconds, samples = done + 1, seconds + line["seconds"], samples + line["samples"]
            if time.monotonic() - last < _NOTE_EVERY_S:
                return
            last = time.monotonic()
            text = f"step {line['step']}/{total}, loss {line['loss']:.4f}, {samples / seconds:.1f} samples/s"
        else:
            metrics = [f"{name} {value:.4f}, " for name, value in line.items() if name not in _EPOCH_KEYS]
            text = (
                f"training loss {line['training_loss']:.4f}, evaluation loss {line['evaluation_loss']:.4f}, "
                f"{''.join(metrics)}{line['samples_per_s']:.1f} samples/s"
            )
        left = (total - line["step"]) * seconds / max(done, 1)
        progress.note(f"seed {plan.seed}: epoch {line['epoch']}, {text}, {format_s(left)} left")

    return report
