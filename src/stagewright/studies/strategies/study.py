"""The study *strategies*: pipeline against data parallel, trained for real, and what large batches do to both.

    for each task:   samples ─► profile, cuts ─► forecasts
    for each round:  serial ─► each experiment that this machine has the devices for ─► speed-up
    for each seed:   every experiment trained ─► accuracy (workers may share devices: that changes no number of it)
    at the end:      batch 256, 1k, 4k under a memory limit: data parallel, the same in pieces, pipeline

As published, 4 workers take twice the batch and twice the rate of 2. The limit, where none is given, is between what
data parallel needs for the two largest batches.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from stagewright.errors import RunError, UsageError
from stagewright.spec.plan import Mesh, OptimizerSpec, Plan
from stagewright.spec.plan_rules import BATCH_NORMS, check_choice
from stagewright.studies.parts.measurements import calibration, measured_data, measured_of, prepared_for
from stagewright.studies.parts.training_recipe import Lesson, choose_lesson, keep_samples, samples_folder
from stagewright.studies.framework.study import Bench, Part, Study
from stagewright.studies.strategies.answers import QUESTIONS
from stagewright.studies.strategies.findings import conclude
from stagewright.studies.strategies.measured import LARGE_KINDS, Way, ways_of

__all__ = ["QUICK", "Options", "study"]

QUICK: dict[str, Any] = {
    "workers": (2,),
    "microbatches": (4,),
    "cuts": ("even",),
    "seeds": (0, 1),
    "train_samples": 192,
    "judged_samples": 100,
    "epochs": 1,
    "batch": 32,
    "rounds": 1,
    "steps": 3,
    "warmup": 1,
    "repeats": 1,
    "large_batches": (48, 96),
    "piece": 16,
}
CUTS = ("even", "client")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is studied; the defaults are the full size."""

    tasks: tuple[str, ...] = ("digits",)
    """Tasks with their backbones: cifar10, rte, cola, digits."""
    data: str | None = None
    """Where data sets are, and weights; None: embedded, or random."""
    weights: str | None = None
    quick: bool = False
    """Whether defaults are the small ones."""
    workers: tuple[int, ...] = (2, 4)
    """Numbers of workers, and pieces of a pipeline's batch."""
    microbatches: tuple[int, ...] = (2, 4, 8)
    cuts: tuple[str, ...] = CUTS
    """How pipelines are cut: even, client."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One training each."""
    train_samples: int | None = None
    """Samples to train on and to judge by; None: all."""
    judged_samples: int | None = None
    epochs: int = 3
    """Passes over them."""
    batch_norm: Literal["plain", "deferred"] = "deferred"
    """How batch norm's running statistics move. Deferred: with the whole batch, alike under every strategy. Plain: with
    each micro-batch or replica, so that what is judged differs where what was learned does not."""
    batch: int | None = None
    """Instead of a task's own, for 2 workers: samples in a step, rate; pixels or tokens."""
    learning_rate: float | None = None
    size: int | None = None
    rounds: int = 3
    """Times that speeds are measured; timed steps, and those before them; rounds of measuring a unit."""
    steps: int = 5
    warmup: int = 2
    repeats: int = 3
    large_batches: tuple[int, ...] = (256, 1024, 4096)
    """Batches under the memory limit of each of 2 devices; None: chosen between data parallel's two largest."""
    memory_bytes: int | None = None
    piece: int = 32
    """Samples of a piece there."""
    devices: tuple[str, ...] = ("cpu:0", "cpu:1")
    """One device a worker; where there are fewer, workers share."""

    def __post_init__(self) -> None:
        if not self.tasks or not self.seeds:
            raise UsageError("nothing to study: give at least one task and one seed")
        if len(self.devices) < 2:
            raise UsageError(f"{len(self.devices)} device can't be shared: give two, like --devices cpu:0,cpu:1")
        if not self.workers or any(count < 2 or count % 2 for count in self.workers):
            given = ", ".join(map(str, self.workers)) or "no"
            raise UsageError(f"{given} workers can't be compared: give even numbers, like 2,4")
        if not self.microbatches or min(self.microbatches) < 1:
            given = ", ".join(map(str, self.microbatches)) or "no"
            raise UsageError(f"{given} micro-batches can't be: give numbers from 1 up, like 2,4,8")
        check_choice("batch norm mode", self.batch_norm, BATCH_NORMS)
        wrong = [cut for cut in self.cuts if cut not in CUTS]
        if wrong:
            raise UsageError(f"{wrong[0]!r} is no way to cut here: use even, client, or both")
        for task in self.tasks:
            if max(self.microbatches) > self.lesson(task).batch:
                raise UsageError(
                    f"{max(self.microbatches)} micro-batches are more than the {self.lesson(task).batch} samples of a "
                    "batch: use fewer --microbatches, or a larger --batch"
                )

    def lesson(self, task: str) -> Lesson:
        """What is learned."""
        return choose_lesson(
            task,
            data=self.data,
            weights=self.weights,
            quick=self.quick,
            size=self.size,
            batch=self.batch,
            learning_rate=self.learning_rate,
        )

    @property
    def ways(self) -> tuple[Way, ...]:
        """Every experiment."""
        return ways_of(self.workers, self.microbatches, self.cuts)

    def is_run(self, workers: int) -> bool:
        """Whether there is a device for each worker."""
        return workers <= len(set(self.devices))

    def plan(self, task: str, way: Way | None, seed: int, cuts: tuple[str, ...] = (), *, workers: int = 2) -> Plan:
        """The plan of an experiment; None: serial with the batch of so many workers."""
        lesson = self.lesson(task)
        count = way.workers if way is not None else workers
        num_workers = way.workers if way is not None else 1
        mesh = Mesh() if way is None else Mesh(**{way.strategy: num_workers})
        is_client = way is not None and way.cut == "client"
        pieces = way.microbatches if way is not None else 1
        num_stages = (num_workers + 1 if is_client else num_workers) if mesh.pipeline > 1 else 1
        return Plan(
            model=lesson.model_spec(seed),
            batch=lesson.batch * count // 2,
            mesh=mesh,
            microbatches=pieces,
            schedule="1f1b" if pieces >= num_stages else "gpipe",
            split="client-server" if is_client else "time",
            batch_norm=self.batch_norm,
            cuts=cuts,
            placement="client-server" if is_client else "auto",
            optimizer=OptimizerSpec(name="adamw", learning_rate=lesson.learning_rate * count / 2),
            devices=tuple(self.devices[worker % len(self.devices)] for worker in range(num_workers)),
            seed=seed,
            steps=self.steps,
            warmup=self.warmup,
        )

    def large_plan(self, kind: str, batch: int, cuts: tuple[str, ...]) -> Plan:
        """A large batch on two devices."""
        strategy = "pipeline" if kind == "pipeline" else "data"
        share = batch if kind == "pipeline" else batch // 2
        pieces = 1 if kind == "data" else max(2, share // self.piece)
        way = Way(strategy=strategy, workers=2, microbatches=pieces, cut="even" if strategy == "pipeline" else "")
        plan = self.plan(self.tasks[0], way, self.seeds[0], cuts if strategy == "pipeline" else ())
        return replace(plan, batch=batch, steps=1 if self.quick else self.steps, warmup=0 if self.quick else 1)


def study(options: Options) -> Study:
    """The study with these options."""
    parts = [calibration(options.devices)]
    for task in options.tasks:
        parts.append(Part(name=f"data-{task}", about=f"the samples of {task}", run=partial(_samples, options, task)))
        parts.append(
            Part(
                name=f"profile-{task}",
                about=f"what the units of {options.lesson(task).model} cost, and where it is cut",
                run=partial(_profile, options, task),
            )
        )
        parts.append(
            Part(
                name=f"forecast-{task}",
                about=f"forecasts of every experiment on {task}",
                run=partial(_forecast, options, task),
                needs=("calibration", f"profile-{task}"),
            )
        )
    for turn in range(1, options.rounds + 1):
        for task in options.tasks:
            parts += _speed_parts(options, task, turn)
    parts += [
        Part(
            name=f"train-{task}-{way.name}-{seed}",
            about=f"{task} learned by {way.name}, seed {seed}",
            run=partial(_train, options, task, way, seed),
            needs=(f"data-{task}", f"profile-{task}"),
        )
        for task in options.tasks
        for seed in options.seeds
        for way in options.ways
    ]
    if options.large_batches:
        first = options.tasks[0]
        parts.append(
            Part(
                name="large-limit",
                about="the memory limit for large batches",
                run=partial(_limit, options),
                needs=(f"profile-{first}",),
            )
        )
        parts += [
            Part(
                name=f"large-{kind}-{batch}",
                about=f"batch {batch} under the limit, {kind}",
                run=partial(_large, options, kind, batch),
                needs=("large-limit", f"profile-{first}"),
            )
            for batch in options.large_batches
            for kind in LARGE_KINDS
        ]
    lessons = {task: options.lesson(task) for task in options.tasks}
    learned = ", ".join(f"{one.model} on {one.shown_data}" for one in lessons.values())
    return Study(
        name="strategies",
        title=f"Pipeline against data parallel: {learned}",
        options=asdict(options),
        questions=QUESTIONS,
        parts=tuple(parts),
        conclude=partial(conclude, asdict(options) | {"lessons": lessons}),
    )


def _speed_parts(options: Options, task: str, turn: int) -> list[Part]:
    """Serial with each batch, then every experiment that has its devices."""
    found = [
        Part(
            name=f"speed-{task}-serial-{count}-{turn}",
            about=f"serial with the batch of {count} workers, {task}, round {turn} of {options.rounds}",
            run=partial(_speed, options, task, None, count),
        )
        for count in options.workers
        if options.is_run(count)
    ]
    return found + [
        Part(
            name=f"speed-{task}-{way.name}-{turn}",
            about=f"{way.name}, {task}, round {turn} of {options.rounds}",
            run=partial(_speed, options, task, way, way.workers),
            needs=(f"profile-{task}",),
        )
        for way in options.ways
        if options.is_run(way.workers)
    ]


def _samples(options: Options, task: str, bench: Bench) -> dict[str, Any]:
    return keep_samples(task, options.data, bench.folder / "samples", options.train_samples, options.judged_samples)


def _profile(options: Options, task: str, bench: Bench) -> dict[str, Any]:
    """The model measured with few, with many and with serial's most samples, and the cuts of every pipeline."""
    from stagewright.partition.conditions import Conditions
    from stagewright.partition.split import split
    from stagewright.planner.costs.source import interpolate_at

    batch = options.lesson(task).batch
    few = max(2, batch // 8)  # one sample alone is too few for batch norm
    most = batch * max(options.workers) // 2  # on a GPU time does not grow with the samples, until it does
    measured = []
    for size in sorted({few, max(few + 2, batch // 2), max(few + 2, most)}):
        bench.tell(f"{size} samples")
        plan = replace(options.plan(task, None, options.seeds[0]), batch=size)
        measured.append(measured_data(plan, repeats=options.repeats))
    models = [measured_of(one) for one in measured]
    cuts: dict[str, list[str]] = {}
    for way in options.ways:
        if way.strategy != "pipeline":
            continue
        pieces = options.plan(task, way, 0).batch // way.microbatches
        profile = interpolate_at(models, pieces).profile
        policy, count = ("client-server", 3) if way.cut == "client" else ("time", way.workers)
        found = split(profile, count, policy, Conditions(num_microbatches=way.microbatches))
        cuts[way.name] = list(found.cut_names)
    large_cuts = split(interpolate_at(models, options.piece).profile, 2, "time", Conditions()).cut_names
    return {"measured": measured, "cuts": cuts, "large_cuts": list(large_cuts)}


def _cuts(bench: Bench, task: str, way: Way | None) -> tuple[str, ...]:
    return () if way is None else tuple(bench.results[f"profile-{task}"]["cuts"].get(way.name, ()))


def _forecast(options: Options, task: str, bench: Bench) -> dict[str, Any]:
    """Every experiment with a device for each worker; one that can't be has its reason."""
    from stagewright.planner.costs.measure import plan_microbatch_sizes
    from stagewright.planner.costs.source import interpolate_at

    models = [measured_of(one) for one in bench.results[f"profile-{task}"]["measured"]]

    def rate(plan: Plan) -> float:
        measured = interpolate_at(models, max(plan_microbatch_sizes(plan)))
        return prepared_for(plan, measured, bench.results["calibration"]).forecast().samples_per_s

    found = {}
    for way in options.ways:
        samples_per_s = rate(options.plan(task, way, options.seeds[0], _cuts(bench, task, way)))
        # As serial is measured: its batch in one piece.
        alone = rate(options.plan(task, None, options.seeds[0], workers=way.workers))
        found[way.name] = {"samples_per_s": samples_per_s, "speedup": samples_per_s / alone}
    return found


def _speed(options: Options, task: str, way: Way | None, workers: int, bench: Bench) -> dict[str, Any]:
    return bench.run(options.plan(task, way, options.seeds[0], _cuts(bench, task, way), workers=workers))


def _train(options: Options, task: str, way: Way, seed: int, bench: Bench) -> dict[str, Any]:
    from stagewright.studies.parts.training import by_pipeline

    plan = options.plan(task, way, seed, _cuts(bench, task, way))
    plan = replace(plan, task=task, epochs=options.epochs, steps=1, warmup=0)
    found = by_pipeline(plan, bench.runs, data=samples_folder(options.data, task, bench), tell=bench.tell)
    return {**found, "run": f"runs/{Path(found['run']).name}", "shared": not options.is_run(way.workers)}


def _limit(options: Options, bench: Bench) -> dict[str, Any]:
    """What each large batch needs by forecast, and the limit."""
    from stagewright.planner.costs.measure import plan_microbatch_sizes
    from stagewright.planner.costs.source import interpolate_at
    from stagewright.planner.fit import peak_bytes

    saved = bench.results[f"profile-{options.tasks[0]}"]
    models = [measured_of(one) for one in saved["measured"]]
    needs: dict[str, dict[str, int]] = {}
    for kind in LARGE_KINDS:
        for batch in options.large_batches:
            plan = options.large_plan(kind, batch, tuple(saved["large_cuts"]))
            needed = peak_bytes(plan, interpolate_at(models, max(plan_microbatch_sizes(plan))))
            needs.setdefault(kind, {})[str(batch)] = needed
    ordered = sorted(needs["data"].values())
    limit = options.memory_bytes
    if limit is None:
        limit = round(math.sqrt(ordered[-1] * ordered[-2])) if len(ordered) > 1 else ordered[0] // 2
    return {"memory_bytes": limit, "is_chosen": options.memory_bytes is None, "needs": needs}


def _large(options: Options, kind: str, batch: int, bench: Bench) -> dict[str, Any]:
    """Run a large batch under the limit; anything but a lack of memory is an error."""
    saved = bench.results[f"profile-{options.tasks[0]}"]
    plan = options.large_plan(kind, batch, tuple(saved["large_cuts"]))
    limit = bench.results["large-limit"]["memory_bytes"]
    about = {"batch": batch, "microbatches": plan.microbatches}
    try:
        row = bench.run(replace(plan, memory_bytes=limit))
    except RunError as error:
        text = str(error).splitlines()[0]
        if "out of memory" not in text:
            raise
        return {**about, "ran": False, "text": text}
    kept = ("samples_per_s", "equal", "peak_memory_bytes", "run")
    return {**about, "ran": True, **{name: row[name] for name in kept}}
