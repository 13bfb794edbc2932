"""Options that several verbs share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from stagewright.api.metric_log import LOGGERS
from stagewright.cli.screen import note, progress
from stagewright.cluster.device import Device, available_cores, pin_process
from stagewright.errors import UsageError
from stagewright.schedules.rules import SCHEDULES
from stagewright.spec.activation_checkpointing import OFFLOADS, RECOMPUTES, check_recompute_mode
from stagewright.spec.optimizers import OPTIMIZERS
from stagewright.spec.plan_rules import (
    BASELINES,
    BATCH_NORMS,
    COMPILES,
    CONTEXT_ATTENTIONS,
    FSDP_GATHERS,
    PRECISIONS,
    check_choice,
)
from stagewright.zoo.validation import check_name

if TYPE_CHECKING:
    from stagewright.graph import UnitGraph
    from stagewright.profiler import Profile
    from stagewright.zoo import Model


def panel(name: str) -> Callable[..., Any]:
    """Return typer.Option for the options under one heading of the help."""
    return partial(typer.Option, rich_help_panel=name)


def choice(
    kind: str, known: Iterable[str], option: Callable[..., Any] = typer.Option, *names: str, **settings: Any
) -> Any:
    """Return an option that takes one of a few words: the help lists them, an error offers the nearest."""
    words = tuple(known)

    def parse(text: str) -> str:
        check_choice(kind, text, words)
        return text

    return option(*names, parser=parse, **{"metavar": "|".join(words), **settings})


def choices(kind: str, known: Iterable[str], option: Callable[..., Any], *names: str, **settings: Any) -> Any:
    """Return an option that takes several of a few words, with commas."""
    words = tuple(known)

    def parse(text: str) -> str:
        for word in text.split(",") if text else ():
            check_choice(kind, word.strip(), words)
        return text

    return option(*names, parser=parse, **{"metavar": f"{'|'.join(words)},…", **settings})


_model_option = panel("Model")
run_option = panel("How it runs")
_UNIT_NAMES = re.compile(r"[.,@\d]")
"""What distinguishes names of units from a mode; a name without any of these is written with a comma behind it."""
SCHEDULE_HELP = f"Pipeline schedule; {', '.join(SCHEDULES)}."
files_option = panel("Files")
measure_option = panel("How it is measured")

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Of `stagewright models`, hf:ORG/NAME, hf:FOLDER, or module:factory.", show_default=False
    ),
]
MicroBatchSize = Annotated[
    int | None, _model_option("--micro-batch-size", min=1, help="Samples in a micro-batch. \\[default: the model's]")
]
Weights = Annotated[str | None, _model_option(metavar="DIR", help="A folder of safetensors files.")]
ImageSize = Annotated[int | None, _model_option(min=1, help="Image height and width in pixels.")]
SequenceLength = Annotated[int | None, _model_option(min=1, help="Tokens per sample.")]
NumClasses = Annotated[int | None, _model_option(min=1, help="Number of classes.")]
_DTYPES = ("float32", "bfloat16", "float16", "float64")
Dtype = Annotated[str | None, choice("dtype", _DTYPES, _model_option, help="Data type.", show_default=False)]
Precision = Annotated[
    str | None,
    choice("precision", PRECISIONS, _model_option, help="Mixed: autocast. \\[default: float32]", show_default=False),
]
Compile = Annotated[
    str | None,
    choice("compile mode", COMPILES, run_option, help="Use torch.compile. \\[default: none]", show_default=False),
]
OptimizerInBackward = Annotated[
    bool, run_option("--optimizer-in-backward", help="Step parameters in backward, and free their gradients.")
]
CudaGraphs = Annotated[bool, run_option("--cuda-graphs", help="Launch stages as CUDA graphs.")]
Seed = Annotated[int, _model_option(help="Random seed; of weights and the example batch.")]
Units = Annotated[str, _model_option(help="auto (blocks), leaf, or module names with commas.")]
DeviceName = Annotated[
    str | None,
    measure_option(
        "--device",
        metavar="NAME",
        help="cuda:0, cpu:0, or cpu:0-1 for two cores. \\[default: the first GPU, else the first core]",
        show_default=False,
    ),
]
Repeats = Annotated[int, measure_option(min=1, help="How many times to measure.")]
Inference = Annotated[bool, measure_option("--inference", help="Forward only; in eval mode. \\[default: training]")]
Fresh = Annotated[bool, measure_option("--fresh", help="Measure again, and replace what is cached.")]
CacheDir = Annotated[
    str | None,
    measure_option(
        metavar="DIR", help="Profile cache. \\[default: $STAGEWRIGHT_CACHE, else the user's]", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Devices = Annotated[
    str | None, run_option(metavar="N|NAMES", help="How many devices; or names: cuda:0,cuda:1.", show_default=False)
]


def microbatches_option(default: str) -> Any:
    """Return the option with the number of micro-batches; `default` is for its help."""
    return run_option(
        "--microbatches",
        "--gradient-accumulation-steps",
        min=1,
        help=f"Micro-batches of a replica. \\[default: {default}]",
    )


PlanMicroBatchSize = Annotated[
    int | None, run_option("--micro-batch-size", min=1, help="Samples in a micro-batch; instead of their number.")
]
Schedule = Annotated[str, choice("schedule", SCHEDULES, run_option, metavar="NAME", help=SCHEDULE_HELP)]
Policy = Annotated[str, run_option(metavar="NAME", help="Split policy; a name, or module:function.")]
Cut = Annotated[list[str] | None, run_option(metavar="UNIT", help="Cut after this unit.", show_default=False)]
ContextAttention = Annotated[
    str,
    choice(
        "attention of context parallelism",
        CONTEXT_ATTENTIONS,
        run_option,
        help="Attention between context parallel workers.",
    ),
]


def _mode_or_units(check: Callable[[str], None], modes: Iterable[str], **settings: Any) -> Any:
    """Return an option that takes a mode, or names of units with commas."""

    def parse(text: str) -> str:
        if not _UNIT_NAMES.search(text):
            check(text)
        return text

    return run_option(parser=parse, metavar=f"{'|'.join(modes)}|UNITS", **settings)


recompute_option = partial(_mode_or_units, check_recompute_mode, RECOMPUTES)
offload_option = partial(_mode_or_units, lambda text: check_choice("offload mode", text, OFFLOADS), OFFLOADS)


def parse_mode_or_units(text: str) -> Any:
    """Return a mode, or the names of units."""
    return tuple(name for name in text.split(",") if name) if _UNIT_NAMES.search(text) else text


Recompute = Annotated[str, recompute_option(help="Activation checkpointing.")]
Offload = Annotated[str, offload_option(help="Saved activations in host memory until backward.")]
Shard = Annotated[bool, run_option("--shard", "--fsdp", help="FSDP2: shard what replicas hold.")]
FSDPShards = Annotated[
    int | None, run_option("--fsdp-shards", min=2, help="HSDP: replicas that shard together. \\[default: all]")
]
FSDPGather = Annotated[
    str,
    choice(
        "fsdp_gather",
        FSDP_GATHERS,
        run_option,
        "--fsdp-gather",
        hidden=True,
        help="Parameters gathered once per step, or for each.",
    ),
]
Zero = Annotated[int, run_option("--zero", min=0, max=2, help="ZeRO stage of replicas that hold all parameters.")]
VocabParallel = Annotated[
    bool, run_option("--vocab-parallel", help="Tensor parallel workers divide the vocabulary and its loss.")
]
SequenceParallel = Annotated[
    bool, run_option("--sequence-parallel", help="Tensor parallel workers divide the sequence in norms and dropout.")
]
Speeds = Annotated[
    str | None,
    run_option(metavar="NUMBERS", help="Relative speeds of devices, like 1,1,0.5; runs also take: measured."),
]
Codec = Annotated[str, run_option(metavar="NAME", help="Codec of a pipeline's links; a name, auto, or module:Class.")]
Memory = Annotated[str | None, run_option(metavar="SIZE", help="Memory limit of each device, like 2GiB.")]
BatchNorm = Annotated[
    str, choice("batch norm mode", BATCH_NORMS, run_option, help="Statistics of a micro-batch, or of the batch.")
]
Baseline = Annotated[
    str,
    choice(
        "baseline",
        BASELINES,
        run_option,
        "--parity-baseline",
        hidden=True,
        help="Baseline of the parity check; the whole model, or streamed unit by unit.",
    ),
]
Optimizer = Annotated[str, choice("optimizer", OPTIMIZERS, run_option, help="Optimizer.")]
Timeout = Annotated[
    float, run_option("--timeout", metavar="SECONDS", min=0.1, help="End a run without progress for this long.")
]
Root = Annotated[
    Path, files_option("--root", "--output-dir", metavar="DIR", help="Where results go; a folder for each run.")
]
DataDir = Annotated[Path | None, files_option("--data-dir", metavar="DIR", help="A folder of parquet files.")]
Tokenizer = Annotated[Path | None, files_option(metavar="DIR", help="A folder with tokenizer.json.")]
Log = Annotated[
    str | None,
    choice("metric log", LOGGERS, files_option, help="Also log losses, metric and rates.", show_default=False),
]
Plot = Annotated[Path | None, files_option(metavar="FILE", help="Draw it (.png, .svg, .pdf).")]
Perfetto = Annotated[
    Path | None, files_option(metavar="FILE", help="A trace for ui.perfetto.dev and chrome://tracing (.json).")
]
ChakraOut = Annotated[
    Path | None, files_option("--chakra-out", metavar="PREFIX", help="Write Chakra execution traces, PREFIX.RANK.et.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The options of a verb that measures a model in its own process."""

    micro_batch_size: MicroBatchSize = None
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
        """Check the model's name and pin this process to the device (by default the first GPU, else the first core)."""
        check_name(model)
        device = Device.parse(self.device if self.device is not None else _first_device())
        pin_process(device)
        return device

    def capture(self, name: str, device: Device) -> tuple[Model, UnitGraph]:
        """Build the model with its example batch and capture it; print notes about its weights, loss and capture."""
        from stagewright import zoo
        from stagewright.graph import capture
        from stagewright.zoo.loss import loss_source
        from stagewright.zoo.model import LOSS_NOTES

        names = ("weights", "image_size", "sequence_length", "num_classes", "dtype", "seed")
        model = zoo.load(name, batch=self.micro_batch_size, **{option: getattr(self, option) for option in names})
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

    fresh: Fresh = False
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
                cache=(self.cache_dir or True) if use_cache else False,
                fresh=self.fresh,
                progress=report,
            )


def announce_cpu() -> None:
    """Say that work runs on the CPU where torch sees no GPU."""
    from stagewright.machine.machine import num_gpus

    if not num_gpus():
        note("torch sees no GPU here: measuring on a CPU core")


def _first_device() -> str:
    """Return the first GPU, else the first core, which is announced; torch is imported only if there is a GPU."""
    from stagewright.machine.machine import num_gpus

    if num_gpus():
        return "cuda:0"
    core = f"cpu:{min(available_cores())}"
    note(f"torch sees no GPU here: measuring on {core}, one core (--device cpu uses all)")
    return core


def check_microbatches(microbatches: int | None, size: int | None) -> None:
    """Refuse both the number of micro-batches and their size."""
    if microbatches is not None and size is not None:
        raise UsageError(f"--microbatches {microbatches} and --micro-batch-size {size} exclude each other; use one")


def unit_names(cuts: list[str] | None) -> tuple[str, ...]:
    """Return the units of `--cut`, which may be repeated or have several names with commas."""
    return tuple(name.strip() for text in cuts or () for name in text.split(",") if name.strip())


def check_output(path: Path, option: str, like: str) -> None:
    """Refuse a file that can't be written, before the work starts; `like` is an example name."""
    if path.is_dir():
        raise UsageError(f"{option} {path}: it is a folder; name a file in it, like {path / like}")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}; create it first: mkdir -p {path.parent}")
    _check_writable(path.parent, f"{option} {path}")


def check_plot(path: Path | None) -> None:
    """Refuse a figure that can't be written, before the work starts."""
    if path is not None:
        from stagewright.report.figures.file import check_figure_path

        check_figure_path(path)


def check_output_folder(path: Path, option: str) -> None:
    """Refuse a folder that can't be written to or created."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise UsageError(f"{option} {path}: {existing} is a file; name a folder")
    _check_writable(existing, f"{option} {path}")


def _check_writable(folder: Path, option: str) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{option}: the folder {folder} is not writable; choose another")


def parse_speeds(text: str | None) -> tuple[float, ...] | Literal["measured"]:
    """Parse the speeds of a run's devices; (): all alike."""
    if text == "measured":
        return "measured"
    try:
        return tuple(numbers(text, "speeds")) if text else ()
    except UsageError as error:
        raise UsageError(f"{error}, or measured") from None


def numbers(text: str, what: str) -> list[float]:
    """Parse numbers separated by commas."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{text!r} is not a list of {what}; write numbers with commas, like 1,1,0.5") from None
