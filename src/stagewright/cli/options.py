"""Options that several verbs share."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.screen import note, progress
from stagewright.cluster.device import Device, available_cores, pin_process
from stagewright.errors import UsageError
from stagewright.zoo.validation import check_name

if TYPE_CHECKING:
    from stagewright.graph import UnitGraph
    from stagewright.profiler import Profile
    from stagewright.zoo import Model


def panel(name: str) -> Callable[..., Any]:
    """Return typer.Option for the options under one heading of the help."""
    return partial(typer.Option, rich_help_panel=name)


_model_option = panel("Model")
measure_option = panel("How it is measured")

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name from `stagewright models`, hf:ORG/NAME or hf:FOLDER, or package.module:factory.",
        show_default=False,
    ),
]
Batch = Annotated[int | None, _model_option(min=1, help="Samples in one micro-batch. \\[default: the model's]")]
Weights = Annotated[str | None, _model_option(metavar="DIR", help="A folder of safetensors files.")]
ImageSize = Annotated[int | None, _model_option(min=1, help="Image height and width in pixels.")]
SequenceLength = Annotated[int | None, _model_option(min=1, help="Tokens per sample.")]
NumClasses = Annotated[int | None, _model_option(min=1, help="Number of classes.")]
Dtype = Annotated[str | None, _model_option(help="float32, bfloat16, float16 or float64.")]
RunDtype = Annotated[str | None, _model_option(help="float32 or bfloat16.")]
Seed = Annotated[int, _model_option(help="Seed of random weights and the example batch.")]
Units = Annotated[str, _model_option(help="auto (whole blocks), leaf (finest), or module names with commas.")]
DeviceName = Annotated[
    str | None,
    measure_option(
        "--device",
        help="cpu:0, cpu:0-1 (pinned cores, as many threads), cuda:0. \\[default: the first core]",
        show_default=False,
    ),
]
Repeats = Annotated[int, measure_option(min=1, help="How many times to measure.")]
Inference = Annotated[bool, measure_option("--inference", help="Forward only, in eval mode. \\[default: training]")]
NoCache = Annotated[bool, measure_option("--no-cache", help="Neither read nor write the profile cache.")]
CacheDir = Annotated[
    str | None,
    measure_option(
        metavar="DIR",
        help="Profile cache. \\[default: $STAGEWRIGHT_CACHE or the user's cache folder]",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The options of a verb that measures a model in its own process."""

    batch: Batch = None
    weights: Weights = None
    image_size: ImageSize = None
    sequence_length: SequenceLength = None
    num_classes: NumClasses = None
    dtype: Dtype = None
    seed: Seed = 0
    units: Units = "auto"
    device: DeviceName = None
    repeats: Repeats = 5
    inference: Inference = False

    def begin(self, model: str) -> Device:
        """Check the model's name and pin this process to the device (by default the first core); needs no torch yet."""
        check_name(model)
        device = Device.parse(self.device if self.device is not None else f"cpu:{min(available_cores())}")
        pin_process(device)
        return device

    def capture(self, name: str, device: Device) -> tuple[Model, UnitGraph]:
        """Build the model with its example batch and capture it; print notes about its weights, loss and capture."""
        from stagewright import zoo
        from stagewright.graph import capture
        from stagewright.zoo.loss import loss_source
        from stagewright.zoo.model import LOSS_NOTES

        names = ("batch", "weights", "image_size", "sequence_length", "num_classes", "dtype", "seed")
        model = zoo.load(name, **{option: getattr(self, option) for option in names})
        model.module.train(not self.inference)
        model = model.to(device.torch_device())
        units = self.units if self.units in ("auto", "leaf") else [name.strip() for name in self.units.split(",")]
        graph = capture(model.module, model.args, model.kwargs, units=units)
        source = loss_source(model.loss, graph.example_result())
        for line in (*model.notes, *([LOSS_NOTES[source]] if source in LOSS_NOTES else []), *graph.notes):
            note(f"note: {line}")
        return model, graph


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions(ModelOptions):
    """The options of a verb that profiles a model."""

    no_cache: NoCache = False
    cache_dir: CacheDir = None

    def profile(self, name: str, model: Model, graph: UnitGraph, device: Device, *, use_cache: bool = True) -> Profile:
        """Measure each unit of a captured model."""
        from stagewright.profiler import profile

        with progress(f"measuring {name} on {device}") as report:
            return profile(
                graph,
                model.args,
                model.kwargs,
                name=name,
                device=device,
                repeats=self.repeats,
                training=not self.inference,
                cache=cache_choice(self.cache_dir, self.no_cache or not use_cache),
                progress=report,
            )


def cache_choice(folder: str | None, no_cache: bool) -> str | bool:
    """Return the profile cache to use: a folder, the user's (True) or none (False)."""
    return False if no_cache else folder or True


def check_output(path: Path, option: str, like: str) -> None:
    """Refuse a file that can't be written, before the work starts; `like` is an example name."""
    if path.is_dir():
        raise UsageError(f"{option} {path}: it is a folder; name a file in it, like {path / like}")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}; create it first: mkdir -p {path.parent}")
    _check_writable(path.parent, f"{option} {path}")


def check_output_folder(path: Path, option: str) -> None:
    """Refuse a folder that can't be written to or created."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise UsageError(f"{option} {path}: {existing} is a file; name a folder")
    _check_writable(existing, f"{option} {path}")


def _check_writable(folder: Path, option: str) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{option}: the folder {folder} is not writable; choose another")


def numbers(text: str, what: str) -> list[float]:
    """Parse numbers separated by commas."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{text!r} is not a list of {what}; write numbers with commas, like 1,1,0.5") from None
