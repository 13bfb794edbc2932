"""Where a training run's losses, metric and rates are logged: CSV, Weights & Biases, TensorBoard, MLflow.

    metric lines of a run ─► MetricLog.write ─► runs/RUN/metrics.csv, or the service of an installed package

CSV is built in. A package that is not installed is one sentence with the command that installs it.
"""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from stagewright.errors import UnknownName, UsageError

Close: TypeAlias = Callable[[], None]
Write: TypeAlias = Callable[[int, Mapping[str, float]], None]
"""``write(step, values)``."""

_PACKAGES = {"csv": None, "wandb": "wandb", "tensorboard": "tensorboard", "mlflow": "mlflow"}
LOGGERS = tuple(_PACKAGES)
_COLUMNS = (
    *("step", "epoch", "loss", "learning_rate", "gradient_norm", "samples_per_s", "memory_bytes"),
    *("training_loss", "evaluation_loss", "metric"),
)


def check_logger(name: str) -> None:
    """Raise UsageError for an unknown logger, or one whose package is not installed."""
    if name not in _PACKAGES:
        raise UnknownName("metric log", name, LOGGERS)
    package = _PACKAGES[name]
    if package is not None and importlib.util.find_spec(package) is None:
        raise UsageError(f"--log {name} needs the package {package}: pip install {package} (--log csv needs none)")


class MetricLog:
    """Writes the metric lines of one training run to a logger."""

    def __init__(self, name: str, folder: Path, about: Mapping[str, Any]) -> None:
        """`folder` is the run folder, `about` the settings of the run, such as model, batch and learning rate."""
        check_logger(name)
        try:
            self._write, self._close = _OPENERS[name](folder, _flat(about))
        except Exception as error:  # of the package, such as a missing login
            raise UsageError(f"--log {name} can't start: {error}") from error

    def write(self, line: Mapping[str, Any]) -> None:
        """Log a line of a worker's metrics.jsonl: a step, or the evaluation after an epoch."""
        if line["kind"] == "step":
            values = {name: line[name] for name in ("epoch", "loss", "memory_bytes")}
            values |= {name: line[name] for name in ("gradient_norm", "learning_rate") if name in line}
            values["samples_per_s"] = line["samples"] / line["seconds"]
        elif line["kind"] == "epoch":
            names = ("kind", "step", "samples_per_s", "evaluation_s")
            values = {name: value for name, value in line.items() if name not in names}
        else:
            return
        self._write(int(line["step"]), values)

    def close(self) -> None:
        """Finish the log."""
        self._close()


def _flat(about: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under dotted names: {"model.name": "gpt2"}."""
    flat: dict[str, Any] = {}
    for name, value in about.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _open_csv(folder: Path, about: dict[str, Any]) -> tuple[Write, Close]:
    file = open(folder / "metrics.csv", "w", newline="", encoding="utf-8")  # noqa: SIM115  # closed by the caller
    rows = csv.DictWriter(file, _COLUMNS)
    rows.writeheader()

    def write(step: int, values: Mapping[str, float]) -> None:
        row: dict[str, float] = {"step": step}
        for name, value in values.items():
            row[name if name in _COLUMNS else "metric"] = value
        rows.writerow(row)
        file.flush()

    return write, file.close


def _open_wandb(folder: Path, about: dict[str, Any]) -> tuple[Write, Close]:
    run = import_module("wandb").init(project="stagewright", name=folder.name, dir=str(folder), config=about)
    return lambda step, values: run.log(dict(values), step=step), run.finish


def _open_tensorboard(folder: Path, about: dict[str, Any]) -> tuple[Write, Close]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(log_dir=str(folder / "tensorboard"))
    writer.add_text("settings", "\n".join(f"{name}: {value}  " for name, value in about.items()))

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return write, writer.close


def _open_mlflow(folder: Path, about: dict[str, Any]) -> tuple[Write, Close]:
    mlflow = import_module("mlflow")
    mlflow.set_experiment("stagewright")
    mlflow.start_run(run_name=folder.name)
    mlflow.log_params(about)
    return lambda step, values: mlflow.log_metrics(dict(values), step=step), mlflow.end_run


_OPENERS: dict[str, Callable[[Path, dict[str, Any]], tuple[Write, Close]]] = {
    "csv": _open_csv,
    "wandb": _open_wandb,
    "tensorboard": _open_tensorboard,
    "mlflow": _open_mlflow,
}
