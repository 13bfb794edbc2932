"""Options that several verbs share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.screen import note
from stagewright.cluster.device import Device, available_cores, pin_process
from stagewright.errors import UsageError
from stagewright.zoo.validation import check_name

if TYPE_CHECKING:
    from stagewright.graph import UnitGraph
    from stagewright.zoo import Model

_MODEL = "Model"
_MEASURE = "How it is measured"

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name from `stagewright models`, hf:ORG/NAME or hf:FOLDER, or package.module:factory.",
        show_default=False,
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(min=1, help="Samples in one micro-batch. \\[default: the model's]", rich_help_panel=_MODEL),
]
Weights = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="A folder of safetensors files.", rich_help_panel=_MODEL),
]
ImageSize = Annotated[int | None, typer.Option(min=1, help="Image height and width in pixels.", rich_help_panel=_MODEL)]
SequenceLength = Annotated[int | None, typer.Option(min=1, help="Tokens per sample.", rich_help_panel=_MODEL)]
NumClasses = Annotated[int | None, typer.Option(min=1, help="Number of classes.", rich_help_panel=_MODEL)]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or float64.", rich_help_panel=_MODEL)]
RunDtype = Annotated[str | None, typer.Option(help="float32 or bfloat16.", rich_help_panel=_MODEL)]
Seed = Annotated[int, typer.Option(help="Seed of random weights and the example batch.", rich_help_panel=_MODEL)]
Units = Annotated[
    str,
    typer.Option(
        help="auto (whole blocks), leaf (finest), or module names with commas.",
        rich_help_panel=_MODEL,
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="cpu:0, cpu:0-1 (pinned cores, as many threads), cuda:0. \\[default: the first core]",
        rich_help_panel=_MEASURE,
        show_default=False,
    ),
]
Repeats = Annotated[int, typer.Option(min=1, help="How many times to measure.", rich_help_panel=_MEASURE)]
Inference = Annotated[
    bool,
    typer.Option("--inference", help="Forward only, in eval mode. \\[default: training]", rich_help_panel=_MEASURE),
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Neither read nor write the profile cache.", rich_help_panel=_MEASURE)
]
CacheDir = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Profile cache. \\[default: $STAGEWRIGHT_CACHE or the user's cache folder]",
        rich_help_panel=_MEASURE,
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """The model options of a command."""

    name: str
    units: str
    """``auto``, ``leaf`` or names with commas."""
    inference: bool
    """Forward only, in eval mode."""
    options: dict[str, Any]
    """Arguments of ``zoo.load``."""

    def capture(self, device: Device) -> tuple[Model, UnitGraph]:
        """Build the model with its example batch and capture it; print notes about its weights, loss and capture."""
        from stagewright import zoo
        from stagewright.graph import capture
        from stagewright.zoo.loss import loss_source
        from stagewright.zoo.model import LOSS_NOTES

        model = zoo.load(self.name, **self.options)
        model.module.train(not self.inference)
        model = model.to(device.torch_device())
        units = self.units if self.units in ("auto", "leaf") else [name.strip() for name in self.units.split(",")]
        graph = capture(model.module, model.args, model.kwargs, units=units)
        source = loss_source(model.loss, graph.example_result())
        for line in (*model.notes, *([LOSS_NOTES[source]] if source in LOSS_NOTES else []), *graph.notes):
            note(f"note: {line}")
        return model, graph


def begin(model: str, text: str | None) -> Device:
    """Check a model's name and pin this process to a device (by default the first core), before torch is imported."""
    check_name(model)
    device = Device.parse(text if text is not None else f"cpu:{min(available_cores())}")
    pin_process(device)
    return device


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
