"""Options of the study *codecs*, and the plan of a training with a codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stagewright.errors import UsageError
from stagewright.spec.plan import Mesh, OptimizerSpec, Plan
from stagewright.studies.framework.options import option, parse_numbers, parse_words, setting
from stagewright.studies.parts.training_options import TrainingOptions, samples_option

SORT = ("sort12+4", "sort9+3", "sort6+2", "sort3+1")
"""16, 12, 8 and 4 bits, as published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(TrainingOptions):
    """Compress what crosses the links of a pipeline: compression ratio, accuracy over seeds, transfer rate."""

    FULL_TASKS: ClassVar[tuple[str, ...]] = ("cifar10", "rte", "cola")

    codecs: tuple[str, ...] = option(
        ("none", "bf16", "block8", "block4/block8", "hadamard4/block8", "hadamard4", "block4", *SORT),
        "Codecs, with commas; or pairs FORWARD/BACKWARD.",
        parse=parse_words,
        quick=("none", "bf16", "block4/block8", "hadamard4", *SORT),
    )
    seeds: tuple[int, ...] = option(
        (0, 1, 2), "Seeds, with commas; one run each.", parse=parse_numbers, quick=(0, 1, 2), panel="Execution"
    )
    train_samples: int | None = samples_option(quick=256)
    judged_samples: int | None = setting(None, quick=200)
    epochs: int = option(3, "Passes over the samples; 0: measure bytes, errors and rates only.", minimum=0, quick=1)
    batch: int | None = option(
        None, "Global batch: samples in a step.", typed=int, minimum=2, default_text="the task's", quick=16
    )
    microbatches: int = option(4, "Micro-batches of a replica.", minimum=1, quick=2)
    how: str = option(
        "pipeline",
        "Train in one process, or with a pipeline of two workers.",
        flag="--one-process/--pipeline",
        typed=bool,
        parse=lambda one_process: "one-process" if one_process else "pipeline",
        quick="one-process",
        panel="Execution",
    )
    """pipeline, or one-process on the first device."""
    rounds: int = setting(9, quick=5)
    """Measurements of each codec and transfer."""

    def __post_init__(self) -> None:
        from stagewright.codecs.registry import check_codec

        if self.how not in ("pipeline", "one-process"):
            raise UsageError(f"unknown way to train {self.how!r}: use pipeline or one-process")
        if len(self.devices) < 2 and self.how != "one-process":
            raise UsageError(
                f"{len(self.devices)} device can't be client and server: give two, like cpu:0,cpu:1, or --one-process"
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
            raise UsageError(f"the codec {repeated[0]!r} is listed twice: name each once")
        for task in self.tasks:
            self.recipe(task)

    def plan(self, task: str, codec: str, seed: int, cuts: tuple[str, ...] = ()) -> Plan:
        """The plan of a client and a server that train with a codec on both links."""
        recipe = self.recipe(task)
        forward, _, backward = codec.partition("/")
        return Plan(
            model=recipe.model_spec(seed),
            batch=recipe.batch,
            mesh=Mesh(pipeline=2),
            microbatches=self.microbatches,
            schedule="gpipe",
            split="client-server",
            cuts=cuts,
            placement="client-server",
            task=task,
            steps=1,
            epochs=self.epochs,
            optimizer=OptimizerSpec(name="adamw", learning_rate=recipe.learning_rate),
            codec=forward,
            codec_backward=backward or None,
            devices=self.ends,
            seed=seed,
        )

    @property
    def ends(self) -> tuple[str, str]:
        """The devices of client and server: the same one where there is only one."""
        return self.devices[0], self.devices[-1]

    @property
    def checked_codecs(self) -> tuple[str, ...]:
        """Codecs whose pipeline gets a parity check: all; quick: the first that changes values noticeably."""
        if len(self.devices) < 2 or not self.epochs:
            return ()
        lossy = [name for name in self.codecs if name not in ("none", "bf16")] or list(self.codecs)
        return tuple(lossy[:1]) if self.quick else self.codecs
