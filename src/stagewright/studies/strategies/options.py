"""Options of the study *strategies*, and the plan of each experiment."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from stagewright.cluster.device import num_separate
from stagewright.errors import UnknownName, UsageError
from stagewright.quantity import parse_bytes
from stagewright.spec.plan import Mesh, OptimizerSpec, Plan
from stagewright.spec.plan_rules import BATCH_NORMS, check_choice
from stagewright.studies.framework.options import option, parse_numbers, parse_words, setting, show_bytes
from stagewright.studies.parts.training_options import TrainingOptions, samples_option
from stagewright.studies.parts.training_recipe import TrainingRecipe, choose_recipe
from stagewright.studies.strategies.measured import CLIENT, Experiment, list_experiments

CUTS = ("even", "client")


def parse_client(text: str) -> tuple[str, ...]:
    """Read `4,3` as ("f4l3",), and `f1l1,f2l2` as both."""
    words = parse_words(text)
    if len(words) == 2 and all(re.fullmatch(r"[1-9]\d*", word) for word in words):
        return (f"f{words[0]}l{words[1]}",)
    wrong = [word for word in words if not re.fullmatch(CLIENT, word)]
    if wrong or not words:
        raise UsageError(
            f"--client {text!r}: write the numbers of first and last units, like 4,3, or several as f4l3,f1l1"
        )
    return words


def _parse_batches(text: str) -> tuple[int, ...]:
    batches = parse_numbers(text)
    return () if batches == (0,) else batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(TrainingOptions):
    """Pipeline or data parallel on 2 and 4 workers: accuracy over seeds, throughput, speed-up; large batches."""

    model: str | None = option(
        None,
        "Model; instead of the task's, with random weights unless --weights names its folder.",
        default_text="the task's",
    )
    workers: tuple[int, ...] = option((2, 4), "Numbers of workers.", parse=parse_numbers, quick=(2,))
    microbatches: tuple[int, ...] = option(
        (2, 4, 8), "Micro-batches of a replica; in pipelines, with commas.", parse=parse_numbers, quick=(4,)
    )
    cuts: tuple[str, ...] = option(
        CUTS,
        "Split policies; even: equal stages, client: first and last units at a client.",
        parse=parse_words,
        flag="--policies",
        choices=CUTS,
        quick=("even",),
    )
    client: tuple[str, ...] = option(
        (),
        "First and last units at the client, instead of those of --policies client: 4,3; several: f1l1,f2l2.",
        parse=parse_client,
        default_text="where it is fastest",
        metavar="N,N",
    )
    seeds: tuple[int, ...] = option(
        (0, 1, 2), "Seeds, with commas; one run each.", parse=parse_numbers, quick=(0, 1, 2), panel="Execution"
    )
    train_samples: int | None = samples_option(quick=192)
    judged_samples: int | None = setting(None, quick=100)
    epochs: int = option(3, "Passes over the samples.", minimum=1, quick=4)
    batch_norm: Literal["plain", "deferred"] = option(
        "deferred", "Statistics of a micro-batch, or of the batch.", choices=BATCH_NORMS
    )
    """Deferred is the same under every strategy. With plain, models that learned the same are evaluated differently."""
    batch: int | None = setting(None)
    batches: tuple[int, ...] = option(
        (),
        "Global batch: samples in a step; on 2 workers, twice as many on 4; several with commas.",
        flag="--batch",
        parse=parse_numbers,
        default_text="the task's",
        quick=(128,),
    )
    """The learning rate is that of the first, and grows with the batch."""
    rounds: int = option(3, "Repeat every run this many times; if it is timed.", minimum=1, quick=1, panel="Execution")
    steps: int = option(5, "Timed steps.", minimum=1, quick=3, panel="Execution")
    warmup: int = setting(2, quick=1)
    """Untimed steps before them."""
    repeats: int = setting(3, quick=1)
    """Measurements of each unit."""
    large_batches: tuple[int, ...] = option(
        (256, 1024, 4096),
        "Batches to run under a memory limit on 2 devices; 0: none.",
        parse=_parse_batches,
        quick=(256, 512),
    )
    memory_bytes: int | None = option(
        None,
        "Memory limit of each device, like 2GiB; for large batches.",
        flag="--memory",
        parse=parse_bytes,
        show=show_bytes,
        default_text="between what data parallel needs for the two largest",
    )
    large_workers: tuple[int, ...] = option(
        (2,), "Numbers of workers that run large batches, with commas; they may share devices.", parse=parse_numbers
    )
    large_epochs: int = option(
        0, "Passes over the samples with each large batch that runs, for its error; 0: none.", minimum=0
    )
    piece: int = setting(32)
    """Samples per micro-batch of the large batches."""

    def __post_init__(self) -> None:
        if not self.tasks or not self.seeds:
            raise UsageError("nothing to study: give at least one task and one seed")
        if len(self.devices) < 2:
            raise UsageError(f"{len(self.devices)} device is not enough: give two, like --devices cpu:0,cpu:1")
        if not self.workers or any(count < 2 or count % 2 for count in self.workers):
            given = ", ".join(map(str, self.workers)) or "no"
            raise UsageError(f"{given} workers can't be compared: give even numbers, like 2,4")
        if not self.microbatches or min(self.microbatches) < 1:
            given = ", ".join(map(str, self.microbatches)) or "no"
            raise UsageError(f"{given} micro-batches are impossible: give numbers from 1 up, like 2,4,8")
        if not self.large_workers or min(self.large_workers) < 2:
            given = ", ".join(map(str, self.large_workers)) or "no"
            raise UsageError(f"--large-workers {given}: give numbers from 2 up, like 2,8")
        small = [batch for batch in self.large_batches if batch < 2 * max(self.large_workers)]
        if small:
            raise UsageError(
                f"--large-batches {small[0]}: {max(self.large_workers)} workers (--large-workers) need "
                f"{2 * max(self.large_workers)} samples or more"
            )
        check_choice("batch norm mode", self.batch_norm, BATCH_NORMS)
        unknown = [cut for cut in self.cuts if cut not in CUTS]
        if unknown:
            raise UnknownName("split policy", unknown[0], CUTS)
        if any(batch < 2 for batch in self.batches):
            raise UsageError(f"--batch {min(self.batches)}: two workers need a batch of 2 or more")
        for recipe in self.recipes.values():
            if max(self.microbatches) > recipe.batch:
                raise UsageError(
                    f"{max(self.microbatches)} micro-batches are more than the {recipe.batch} samples of a batch: use "
                    "fewer --microbatches, or a larger --batch"
                )

    @classmethod
    def most_devices(cls, given: Mapping[str, Any]) -> int:
        """How many devices the study can use."""
        return max(given.get("workers") or (4,))

    @property
    def recipes(self) -> dict[str, TrainingRecipe]:
        """How each task is trained, with each batch: rte, and rte-b64 with the second of --batch 32,64."""
        return {case: self.recipe(case) for case in self.cases}

    @property
    def cases(self) -> tuple[str, ...]:
        """The tasks, each with every batch."""
        others = tuple(dict.fromkeys(self.batches))[1:]
        return tuple(case for task in self.tasks for case in (task, *(f"{task}-b{batch}" for batch in others)))

    def recipe(self, task: str) -> TrainingRecipe:
        """How a case is trained; its learning rate is in proportion to its batch."""
        name, _, batch = task.partition("-b")
        recipe = choose_recipe(
            name,
            data=self.data,
            weights=self.weights,
            quick=self.quick,
            size=self.size,
            learning_rate=self.learning_rate,
            model=self.model,
        )
        if self.batches:
            recipe = replace(recipe, batch=self.batches[0])
        if not batch:
            return recipe
        return replace(recipe, batch=int(batch), learning_rate=recipe.learning_rate * int(batch) / recipe.batch)

    @property
    def experiments(self) -> tuple[Experiment, ...]:
        return list_experiments(self.workers, self.microbatches, self.all_cuts)

    @property
    def all_cuts(self) -> tuple[str, ...]:
        """How pipelines are cut: --client replaces the published client and server."""
        cuts = tuple(cut for cut in CUTS if cut in self.cuts)
        return (*(cut for cut in cuts if cut != "client"), *self.client) if self.client else cuts

    def is_run(self, workers: int) -> bool:
        """Whether there is a device for each worker."""
        return workers <= num_separate(self.devices)

    def plan(
        self, task: str, experiment: Experiment | None, seed: int, cuts: tuple[str, ...] = (), *, workers: int = 2
    ) -> Plan:
        """The plan of an experiment; None: the single-device baseline with the batch of `workers` workers."""
        recipe = self.recipe(task)
        count = experiment.workers if experiment is not None else workers
        num_workers = experiment.workers if experiment is not None else 1
        mesh = Mesh() if experiment is None else Mesh.parse(f"{experiment.strategy}={num_workers}")
        is_client = experiment is not None and experiment.is_client
        microbatches = experiment.microbatches if experiment is not None else 1
        num_stages = (num_workers + 1 if is_client else num_workers) if mesh.pipeline > 1 else 1
        return Plan(
            model=recipe.model_spec(seed),
            batch=recipe.batch * count // 2,
            mesh=mesh,
            microbatches=microbatches,
            schedule="1f1b" if microbatches >= num_stages else "gpipe",
            split="client-server" if is_client else "time",
            batch_norm=self.batch_norm,
            cuts=cuts,
            placement="client-server" if is_client else "auto",
            optimizer=OptimizerSpec(name="adamw", learning_rate=recipe.learning_rate * count / 2),
            devices=tuple(self.devices[worker % len(self.devices)] for worker in range(num_workers)),
            seed=seed,
            steps=self.steps,
            warmup=self.warmup,
        )

    @property
    def largest_step(self) -> int:
        """Step in which the largest batch is searched: an eighth of the smallest large batch, even."""
        return max(2, min(self.large_batches) // 16 * 2)

    def large_plan(self, kind: str, batch: int, cuts: tuple[str, ...], workers: int = 2) -> Plan:
        """The plan of a large batch; its learning rate grows with the square root of the batch, as suits AdamW."""
        strategy = "pipeline" if kind == "pipeline" else "data"
        share = batch if kind == "pipeline" else batch // workers
        microbatches = 1 if kind == "data" else max(2, share // self.piece)
        experiment = Experiment(
            strategy=strategy, workers=workers, microbatches=microbatches, cut="even" if strategy == "pipeline" else ""
        )
        plan = self.plan(self.tasks[0], experiment, self.seeds[0], cuts if strategy == "pipeline" else ())
        recipe = self.recipe(self.tasks[0])
        rate = recipe.learning_rate * math.sqrt(batch / recipe.batch)
        return replace(plan, batch=batch, warmup=1, optimizer=replace(plan.optimizer, learning_rate=rate))
