"""The study *codecs*: what crosses the links of a client and a server, and what each codec makes of it.

    for each task:    samples ─► what crosses ─► each codec on it: error, true ratio, time ─► honest transfer rates
    for each codec:   one step of the real pipeline, proven equal to serial with the same codec (quick: for one of them)
    for each seed:    the same fine-tuning with each codec on the links ─► accuracy

Fine-tuning is done by a real pipeline; quick, in one process with the same codecs at the same cuts, which that proof
shows to be the same computation. With a single device (one GPU) it is always one process, without that proof, and
transfers are between two workers that share it. Without epochs nothing is trained: bytes, errors, times and rates.

The model is cut as was published: its first and last units at the client, the rest at the server, so that two tensors
cross, and their gradients back. Sort quantisation at 16, 12, 8 and 4 bits stands beside ours. Codecs are named FORWARD
or FORWARD/BACKWARD.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from stagewright.errors import UsageError
from stagewright.spec.plan import Mesh, OptimizerSpec, Plan
from stagewright.studies.codecs.answers import QUESTIONS
from stagewright.studies.codecs.findings import conclude
from stagewright.studies.codecs.measured import part_name
from stagewright.studies.parts.training_recipe import Lesson, choose_lesson, keep_samples, samples_folder
from stagewright.studies.framework.study import Bench, Part, Study

__all__ = ["QUICK", "Options", "study"]

SORT = ("sort12+4", "sort9+3", "sort6+2", "sort3+1")
"""16, 12, 8 and 4 bits, as published."""

QUICK: dict[str, Any] = {
    "codecs": ("none", "bf16", "block4/block8", "hadamard4", *SORT),
    "seeds": (0, 1),
    "train_samples": 256,
    "judged_samples": 200,
    "epochs": 1,
    "batch": 16,
    "microbatches": 2,
    "how": "one-process",
    "rounds": 5,
}


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
    codecs: tuple[str, ...] = (
        "none",
        "bf16",
        "block8",
        "block4/block8",
        "hadamard4/block8",
        "hadamard4",
        "block4",
        *SORT,
    )
    """FORWARD or FORWARD/BACKWARD."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One training each."""
    train_samples: int | None = None
    """Samples to train on and to judge by; None: all."""
    judged_samples: int | None = None
    epochs: int = 3
    """Passes over them; 0: nothing is trained."""
    batch: int | None = None
    """Instead of a task's own: samples in a step, rate, pixels or tokens."""
    learning_rate: float | None = None
    size: int | None = None
    microbatches: int = 4
    """Pieces of a batch."""
    how: str = "pipeline"
    """pipeline, or one-process on the first device."""
    rounds: int = 9
    """Rounds of measuring codecs and transfers."""
    devices: tuple[str, ...] = ("cpu:0", "cpu:1")
    """The client's and the server's; one process can do with one device."""

    def __post_init__(self) -> None:
        from stagewright.codecs.name import check_codec

        if self.how not in ("pipeline", "one-process"):
            raise UsageError(f"{self.how!r} is no way to train here: use pipeline or one-process")
        if len(self.devices) < 2 and self.how != "one-process":
            raise UsageError(
                f"{len(self.devices)} device is no client and server: give two, like cpu:0,cpu:1, or --one-process"
            )
        if not self.codecs or not self.seeds or not self.tasks:
            raise UsageError("nothing to study: give at least one task, one codec and one seed")
        for name in self.codecs:
            for half in name.split("/"):
                check_codec(half)
            if name.count("/") > 1 or "auto" in name:
                raise UsageError(f"{name!r} is not a pair of codecs: write FORWARD or FORWARD/BACKWARD")
        if "none" not in self.codecs:
            raise UsageError("codecs are compared with none: add none to --codecs")
        repeated = [name for name in self.codecs if self.codecs.count(name) > 1]
        if repeated:
            raise UsageError(f"the codec {repeated[0]!r} is there twice: name each once")
        for task in self.tasks:
            self.lesson(task)

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

    def plan(self, task: str, codec: str, seed: int, cuts: tuple[str, ...] = ()) -> Plan:
        """A client and a server that train with a codec on both links."""
        lesson = self.lesson(task)
        forward, _, backward = codec.partition("/")
        return Plan(
            model=lesson.model_spec(seed),
            batch=lesson.batch,
            mesh=Mesh(pipeline=2),
            microbatches=self.microbatches,
            schedule="gpipe",
            split="client-server",
            cuts=cuts,
            placement="client-server",
            task=task,
            steps=1,
            epochs=self.epochs,
            optimizer=OptimizerSpec(name="adamw", learning_rate=lesson.learning_rate),
            codec=forward,
            codec_backward=backward or None,
            devices=self.ends,
            seed=seed,
        )

    @property
    def ends(self) -> tuple[str, str]:
        """The client's device and the server's: the same where there is one."""
        return self.devices[0], self.devices[-1]

    @property
    def proven(self) -> tuple[str, ...]:
        """Codecs whose pipeline is proven equal to serial: all, or quick the first of them that is no plain one."""
        if len(self.devices) < 2 or not self.epochs:
            return ()
        found = [name for name in self.codecs if name not in ("none", "bf16")] or list(self.codecs)
        return tuple(found[:1]) if self.quick else self.codecs


def study(options: Options) -> Study:
    """The study with these options."""
    parts = []
    for task in options.tasks:
        parts.append(Part(name=f"data-{task}", about=f"the samples of {task}", run=partial(_samples, options, task)))
        parts.append(
            Part(
                name=f"crossing-{task}",
                about=f"what crosses the links of {task}, and each codec on it",
                run=partial(_crossing, options, task),
                needs=(f"data-{task}",),
            )
        )
        parts.append(
            Part(
                name=f"transfer-{task}",
                about=f"how fast what crosses in {task} gets to the other side",
                run=partial(_transfer, options, task),
                needs=(f"crossing-{task}",),
            )
        )
    parts += [
        Part(
            name=part_name(task, codec, None),
            about=f"a step of {task} with {codec} by a real pipeline, compared with serial",
            run=partial(_prove, options, task, codec),
            needs=(f"crossing-{task}",),
        )
        for task in options.tasks
        for codec in options.proven
    ]
    parts += [
        Part(
            name=part_name(task, codec, seed),
            about=f"{task} learned with {codec}, seed {seed}",
            run=partial(_train, options, task, codec, seed),
            needs=(f"data-{task}", f"crossing-{task}"),
        )
        for task in options.tasks
        for seed in (options.seeds if options.epochs else ())
        for codec in options.codecs
    ]
    lessons = {task: options.lesson(task) for task in options.tasks}
    return Study(
        name="codecs",
        title=f"Codecs on the links of {', '.join(f'{one.model} on {one.shown_data}' for one in lessons.values())}",
        options=asdict(options),
        questions=QUESTIONS,
        parts=tuple(parts),
        conclude=partial(conclude, asdict(options) | {"lessons": lessons}),
    )


def _samples(options: Options, task: str, bench: Bench) -> dict[str, Any]:
    return keep_samples(task, options.data, bench.folder / "samples", options.train_samples, options.judged_samples)


def _crossing(options: Options, task: str, bench: Bench) -> dict[str, Any]:
    """Where the model is cut, the shapes that cross, and what each codec does to a micro-batch of them, both ways."""
    import torch

    from stagewright.cluster.device import Device
    from stagewright.engine.jobs.codec_bench import bench_codecs
    from stagewright.engine.jobs.train import with_samples
    from stagewright.engine.parallel.replica import capture_for, cut_indices
    from stagewright.engine.pipeline.crossing_tensors import collect_crossing_tensors
    from stagewright.studies.parts.training import client_cuts
    from stagewright.zoo.model import Batch
    from stagewright.zoo.tasks import load_task

    lesson, seed = options.lesson(task), options.seeds[0]
    cuts = client_cuts(options.plan(task, "none", seed), *lesson.client)
    plan = options.plan(task, "none", seed, cuts)
    device = Device.parse(plan.devices[0])
    place = device.torch_device()
    model = plan.model.load(batch=max(2, plan.batch // plan.microbatches))
    model.module.train().to(place)
    samples = load_task(task, model, data_dir=samples_folder(options.data, task, bench)).dataset("train")
    model = with_samples(model, samples, place)
    graph = capture_for(plan, model)
    places = cut_indices(graph, cuts)
    batch = Batch(args=model.args, kwargs=model.kwargs, target=model.target)
    tensors = collect_crossing_tensors(graph, places, batch, None)[False]
    size = model.batch_size
    names = list(dict.fromkeys(half for codec in options.codecs for half in codec.split("/")))
    with device.pinned():
        found = bench_codecs(
            model,
            graph,
            places,
            names,
            (),
            device=plan.devices[0],
            repeats=options.rounds,
            progress=lambda done, total, name: bench.tell(f"{name}: {done} of {total}") if done % 8 == 0 else None,
        )
    return {
        "cuts": list(cuts),
        # Of a whole batch, as tables have them; what is measured is one micro-batch.
        "shapes": [[[plan.batch, *one.shape[1:]] for one in row] for row in tensors],
        "message": list(max((one for row in tensors for one in row), key=torch.numel).shape),
        "messages": plan.batch / size,
        "kernels": found.kernels,
        "rows": [_finite(row.to_dict(())) for row in found.rows],
    }


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: null instead."""
    return {name: None if value in (float("inf"), float("-inf")) else value for name, value in row.items()}


def _transfer(options: Options, task: str, bench: Bench) -> dict[str, Any]:
    """Seconds of the largest message with each codec, and of plain bytes by size."""
    from stagewright.studies.codecs.transfer_job import measure_transfers

    names = list(dict.fromkeys(half for codec in options.codecs for half in codec.split("/")))
    plain = [name for name in names if not name.startswith(("delta", "feedback"))]  # those remember: no single message
    shape = bench.results[f"crossing-{task}"]["message"]
    return measure_transfers(plain, shape, options.ends, rounds=options.rounds)


def _prove(options: Options, task: str, codec: str, bench: Bench) -> dict[str, Any]:
    cuts = tuple(bench.results[f"crossing-{task}"]["cuts"])
    plan = options.plan(task, codec, options.seeds[0], cuts)
    return bench.run(replace(plan, task=None, epochs=None, steps=1, warmup=0))


def _train(options: Options, task: str, codec: str, seed: int, bench: Bench) -> dict[str, Any]:
    from stagewright.studies.parts.training import by_one_process, by_pipeline

    plan = options.plan(task, codec, seed, tuple(bench.results[f"crossing-{task}"]["cuts"]))
    data = samples_folder(options.data, task, bench)
    if options.how == "one-process":
        return by_one_process(plan, data=data, device=options.devices[0], tell=bench.tell)
    found = by_pipeline(plan, bench.runs, data=data, tell=bench.tell)
    return {**found, "run": f"runs/{Path(found['run']).name}"}
