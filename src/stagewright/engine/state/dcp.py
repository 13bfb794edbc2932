"""Checkpoints of ``torch.distributed.checkpoint`` (DCP): convert from and to ours.

    model.NAME                        parameters and buffers, by the model's names
    optimizer.state.NAME.KEY          optimizer states, as torch's ``get_state_dict`` names them
    optimizer.param_groups            not converted: options belong to the script

A DCP folder has its index in ``.metadata``, which torch unpickles: import only folders that you trust. No process group
is needed, and tensors are read one at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from stagewright.engine.state.checkpoint import Checkpoint, write_checkpoint
from stagewright.errors import DataMissing, UsageError

_MODEL = "model."
_STATES = ("optimizer.state.", "optim.state.")


def export_dcp(checkpoint: str | Path, folder: str | Path) -> None:
    """Write a checkpoint as a DCP folder that ``torch.distributed.checkpoint.load`` reads under any layout."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    saved = Checkpoint.open(checkpoint)
    states: dict[str, Any] = {_MODEL + name: saved.model_tensor(name) for name in sorted(saved.model_names())}
    for name in sorted(saved.model_names()):
        for key, value in saved.optimizer_state(name).items():
            states[f"{_STATES[0]}{name}.{key}"] = value
    with _without_warning():
        save(states, storage_writer=FileSystemWriter(Path(folder)), no_dist=True)


def import_dcp(folder: str | Path, checkpoint: str | Path, *, step: int, optimizer: str | None = None) -> None:
    """Write a DCP folder as a checkpoint that a trainer loads.

    Args:
        folder: The DCP folder, saved under any layout.
        checkpoint: The folder to write.
        step: Number of steps that it has been trained for.
        optimizer: Class name of the optimizer (``"AdamW"``), if its states are to be loaded too.
    """
    values = dict(_read_dcp(Path(folder)))
    model = {name.removeprefix(_MODEL): value for name, value in values.items() if not name.startswith(_STATES)}
    if not model:
        raise UsageError(f"{folder} holds no tensor outside {' and '.join(_STATES)}; its model is missing")
    states: dict[str, Any] = {}
    for name, value in values.items():
        prefix = next((prefix for prefix in _STATES if name.startswith(prefix)), None)
        if prefix is not None and optimizer is not None:
            parameter, _, key = name.removeprefix(prefix).rpartition(".")
            states[f"{key}/{parameter}"] = value
    write_checkpoint(
        checkpoint,
        rank=0,
        barrier=lambda: None,
        model=model,
        optimizer={key: value for key, value in states.items() if isinstance(value, torch.Tensor)},
        scalars={key: value for key, value in states.items() if not isinstance(value, torch.Tensor)},
        content={
            "step": step,
            "seed": 0,
            "mesh": "",
            "optimizer": {"kind": optimizer, "groups": []},
            "codec": None,
            "caller": {},
        },
    )


def _read_dcp(folder: Path) -> Iterator[tuple[str, Any]]:
    """Read every tensor and number of a DCP folder, in full."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    if not (folder / ".metadata").is_file():
        raise DataMissing(f"{folder} is not a DCP checkpoint: it has no .metadata")
    reader = FileSystemReader(folder)
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        is_tensor = isinstance(entry, TensorStorageMetadata)
        if not is_tensor and not name.startswith(_STATES):
            continue  # options, counters of a data loader, …
        value: Any = torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else None  # type: ignore[union-attr]
        state = {name: value}
        with _without_warning():
            load(state, storage_reader=FileSystemReader(folder), no_dist=True)
        yield name, state[name]


@contextmanager
def _without_warning() -> Iterator[None]:
    """Suppress torch's warning that a single process saves or loads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
