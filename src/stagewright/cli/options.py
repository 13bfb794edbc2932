"""Options that several verbs share, and what they mean."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.screen import note
from stagewright.cluster.device import Device, available_cores, pin_process
from stagewright.errors import UsageError
from stagewright.zoo.check import check_name

if TYPE_CHECKING:
    from stagewright.graph import UnitGraph
    from stagewright.zoo import Model

__all__ = [
    "Batch",
    "CacheDir",
    "DeviceName",
    "Dtype",
    "ImageSize",
    "Inference",
    "Json",
    "ModelChoice",
    "ModelName",
    "NoCache",
    "NumClasses",
    "Repeats",
    "RunDtype",
    "Seed",
    "SequenceLength",
    "Units",
    "Weights",
    "begin",
    "check_output",
    "check_output_folder",
    "devices_of",
    "numbers",
]

_MODEL = "Which model"
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
    typer.Option(min=1, help="Samples in one micro-batch. \\[default: the model's own]", rich_help_panel=_MODEL),
]
Weights = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="A folder with safetensors to load.", rich_help_panel=_MODEL),
]
ImageSize = Annotated[int | None, typer.Option(min=1, help="Pixels a side.", rich_help_panel=_MODEL)]
SequenceLength = Annotated[int | None, typer.Option(min=1, help="Tokens a sample.", rich_help_panel=_MODEL)]
NumClasses = Annotated[int | None, typer.Option(min=1, help="Classes of a classifier.", rich_help_panel=_MODEL)]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or float64.", rich_help_panel=_MODEL)]
RunDtype = Annotated[str | None, typer.Option(help="float32 or bfloat16.", rich_help_panel=_MODEL)]
Seed = Annotated[int, typer.Option(help="Of random weights and the example.", rich_help_panel=_MODEL)]
Units = Annotated[
    str,
    typer.Option(
        help="auto (whole blocks), leaf (the finest cut), or names of modules to keep whole, with commas.",
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
Repeats = Annotated[int, typer.Option(min=1, help="Rounds of measuring.", rich_help_panel=_MEASURE)]
Inference = Annotated[
    bool,
    typer.Option("--inference", help="Forward alone, in eval mode; without it training.", rich_help_panel=_MEASURE),
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Neither read nor write the profile cache.", rich_help_panel=_MEASURE)
]
CacheDir = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Where profiles are kept. \\[default: $STAGEWRIGHT_CACHE or the user's cache]",
        rich_help_panel=_MEASURE,
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Data on standard output instead of tables.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """What was typed about the model."""

    name: str
    """Its name, as typed."""
    units: str
    """``auto``, ``leaf`` or names with commas."""
    inference: bool
    """Eval mode and forward alone."""
    options: dict[str, Any]
    """Passed on to ``zoo.load``."""

    def captured(self, device: Device) -> tuple[Model, UnitGraph]:
        """Build the model with its example batch, in the mode that is to be measured, and capture it.

        Tells what the user should know about how it was made, whose loss it has, and how it was captured.
        """
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
    """Check a model's name and pin this process to a device, before torch is imported.

    Without a device's name it is the first core that this process may use.
    """
    check_name(model)
    device = Device.parse(text if text is not None else f"cpu:{min(available_cores())}")
    pin_process(device)
    return device


def devices_of(text: str) -> tuple[str, ...]:
    """The devices that `--devices` asks for: how many (one core or GPU each), or their names."""
    if text.strip().isdigit():
        if int(text) < 1:
            raise UsageError(f"--devices {text}: must be at least 1")
        from stagewright.machine.machine import default_devices

        return default_devices(int(text))
    names = tuple(name.strip() for name in re.split(r"[;,]\s*(?=cpu|cuda)", text))
    for name in names:
        if not name.startswith(("cpu", "cuda")):
            raise UsageError(
                f"--devices {text!r}: {name!r} is neither a number of devices nor a device; write 2, or cpu:0,cpu:1"
            )
        Device.parse(name)
    return names


def check_output(path: Path, option: str, like: str) -> None:
    """UsageError where no file can be written there: before the work whose result it is; `like` is a usual name."""
    if path.is_dir():
        raise UsageError(f"{option} {path}: that is a folder; name a file in it, like {path / like}")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}; make it first: mkdir -p {path.parent}")
    _check_writable(path.parent, f"{option} {path}")


def check_output_folder(path: Path, option: str) -> None:
    """UsageError where files can't be written in a folder of this name, which is made where it is not there."""
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not there.is_dir():
        raise UsageError(f"{option} {path}: {there} is a file; name a folder")
    _check_writable(there, f"{option} {path}")


def _check_writable(folder: Path, asked: str) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{asked}: the folder {folder} can't be written to; choose another")


def numbers(text: str, what: str) -> list[float]:
    """Numbers separated by commas."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{text!r} is not a list of {what}; write numbers with commas, like 1,1,0.5") from None
