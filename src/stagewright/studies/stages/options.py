"""Options of the study *stages*, and the plan of each of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stagewright.errors import UsageError
from stagewright.spec.plan import Mesh, ModelSpec, Plan
from stagewright.studies.framework.options import Note, option, parse_numbers, parse_words, quick_values, setting
from stagewright.studies.parts.devices import choose_devices, devices_option

_MODES = ("inference", "training")
_QUICK_PIXELS = 128  # image size of the quick model
_CONTRAST = "mobilenet-v2"
_CONTRAST_PIXELS = 128
_CONTRAST_SAMPLES, _QUICK_CONTRAST_SAMPLES = 4, 2  # in a micro-batch, at most: a batch is chosen for the other model


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Split a model into 2 to 6 pipeline stages by every policy: speed-ups, the best policy, what limits it."""

    model: str = option("deit-small", "Model; any.", quick="deit-tiny")
    quick: bool = setting(False)
    stages: tuple[int, ...] = option((2, 3, 4, 6), "How many stages; with commas.", parse=parse_numbers)
    policies: tuple[str, ...] = option(
        ("parameters", "macs", "blocks", "time", "optimal"), "Split policies; with commas.", parse=parse_words
    )
    contrast: str = option(
        _CONTRAST,
        "A second model, in 2 stages, which the policies cut differently; none: leave it out.",
        metavar="MODEL",
    )
    units: str = option("auto", "auto (blocks), leaf, or module names with commas.")
    modes: tuple[str, ...] = option(_MODES, "What to run.", parse=parse_words, choices=_MODES)
    batch: int = option(32, "Global batch: samples in a step.", minimum=1, quick=32)
    microbatches: int = option(16, "Micro-batches of a replica.", minimum=1, quick=8)
    rounds: int = option(3, "Repeat every run this many times.", minimum=1, quick=1, panel="Execution")
    steps: int = option(5, "Timed steps.", minimum=1, quick=4, panel="Execution")
    warmup: int = setting(2, quick=1)
    """Untimed steps before them."""
    repeats: int = setting(5, quick=3)
    """Measurements of each unit."""
    devices: tuple[str, ...] = devices_option("all GPUs")
    """One device per worker."""
    oversubscribe: bool = option(
        False, "Also run more stages than devices; stages then share devices, and are marked.", panel="Execution"
    )
    cluster: str | None = option(
        None,
        "A cluster file, or a name like 8xh100 or 32x8xa100; only forecasts are for it.",
        metavar="FILE|NAME",
        panel="Execution",
        default_text="this machine",
    )
    image_size: int | None = option(None, "Image height and width in pixels.", typed=int, minimum=1)
    sequence_length: int | None = option(None, "Tokens per sample.", typed=int, minimum=1)
    seed: int = option(0, "Random seed; of weights and samples.", panel="Execution")

    def __post_init__(self) -> None:
        unknown = [mode for mode in self.modes if mode not in _MODES]
        if unknown or not self.modes:
            raise UsageError(
                f"modes are inference and training, not {', '.join(unknown) or 'none'}: use one, or both with a comma"
            )
        if not self.stages or min(self.stages) < 2:
            given = ", ".join(map(str, self.stages)) or "no"
            raise UsageError(f"{given} stages are not a pipeline: give numbers from 2 up, like 2,4")
        if self.microbatches < max(self.stages):
            raise UsageError(
                f"{self.microbatches} micro-batches can't fill {max(self.stages)} stages: use --microbatches "
                f"{max(self.stages)} or more, or fewer --stages"
            )
        if len(self.devices) < 2 and not self.oversubscribe:
            raise UsageError(
                f"{len(self.devices)} device can't run a pipeline: give two, like --devices cpu:0,cpu:1, or "
                "--oversubscribe"
            )
        if self.batch < self.microbatches:
            raise UsageError(
                f"a batch of {self.batch} can't be split into {self.microbatches} micro-batches: use --batch "
                f"{self.microbatches} or more, or fewer --microbatches"
            )

    @classmethod
    def machine_defaults(cls, given: Mapping[str, Any], *, quick: bool, note: Note) -> dict[str, Any]:
        """Choose the devices where none are given."""
        return {"devices": given.get("devices") or choose_devices(max(given.get("stages") or (6,)))}

    def plan(self, mode: str, num_stages: int, cuts: tuple[str, ...] = ()) -> Plan:
        """The plan of a run: the single-device baseline runs the whole batch at once, a pipeline in micro-batches."""
        return Plan(
            model=ModelSpec(
                name=self.model, image_size=self.pixels, sequence_length=self.sequence_length, seed=self.seed
            ),
            batch=self.batch,
            mesh=Mesh(pipeline=num_stages),
            microbatches=self.microbatches if num_stages > 1 else 1,
            cuts=cuts,
            units=self.units,
            training=mode == "training",
            devices=tuple(self.devices[worker % len(self.devices)] for worker in range(num_stages)),
            seed=self.seed,
            steps=self.steps,
            warmup=self.warmup,
        )

    @property
    def pixels(self) -> int | None:
        """Image size: small for the quick model unless given; None: the model's default."""
        is_quick_model = self.quick and self.model == quick_values(Options)["model"]
        return _QUICK_PIXELS if self.image_size is None and is_quick_model else self.image_size

    @property
    def contrast_options(self) -> Options | None:
        """The options of the second model: its policies compared in 2 stages, in one mode; None: there is none."""
        is_compared = len(self.policies) > 1 and (self.oversubscribe or len(self.devices) > 1)
        if self.contrast in ("none", "", self.model) or not is_compared:
            return None
        return replace(
            self,
            model=self.contrast,
            contrast="none",
            stages=(2,),
            modes=self.modes[:1],
            batch=min(self.batch, self.microbatches * (_QUICK_CONTRAST_SAMPLES if self.quick else _CONTRAST_SAMPLES)),
            units="auto",
            image_size=_CONTRAST_PIXELS if self.contrast == _CONTRAST else None,
            sequence_length=None,
        )

    @property
    def run_stages(self) -> tuple[int, ...]:
        """Numbers of stages that are run; the others are only forecast."""
        return tuple(count for count in self.stages if self.oversubscribe or count <= len(self.devices))
