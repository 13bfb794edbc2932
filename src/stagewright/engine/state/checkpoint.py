"""Checkpoints: full tensors under the plain model's names, so that any other plan can go on from them.

    step-00000120/
      index.json                         what it is, counters, the files and their sizes; written last
      model/worker-00000.safetensors     parameters and buffers that worker 0 owns, by the model's own names
      optimizer/worker-00000.safetensors its optimiser's tensors, as "exp_avg/NAME"; other values in the header
      codec/worker-00000.safetensors     what its ends of links remember, for the same links alone; where codecs do

Written into a hidden folder beside its place and renamed when every file is on the disk: a folder with that name is
whole. Safetensors and JSON alone: nothing here is pickled. ``torch.distributed.checkpoint`` with its default storage
reads its ``.metadata`` with pickle and its collective planners exchange pickles, so it is not used to write; but its
``HuggingFaceStorageReader`` reads ``model/``, and so does ``--weights`` for a model without a configuration.
Workers on several machines need one shared file system.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stagewright.errors import DataMissing, RunError, UsageError

__all__ = ["Checkpoint", "checkpoint_name", "latest", "prune", "write_checkpoint", "write_safetensors"]

FORMAT = "stagewright checkpoint 1"
_NAME = re.compile(r"step-(\d+)")


def checkpoint_name(step: int) -> str:
    """The folder's name after a number of steps."""
    return f"step-{step:08d}"


def write_checkpoint(
    path: str | Path,
    *,
    rank: int,
    together: Callable[[], None],
    model: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    scalars: Mapping[str, Any],
    content: Mapping[str, Any],
    codec: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write what this worker owns; every worker calls this, ``together`` waits for all, worker 0 makes it appear.

    ``optimizer`` and ``scalars`` (values that are no tensors) are named ``KEY/PARAMETER``; ``content`` is worker 0's.
    """
    path = Path(path)
    hidden = path.with_name(f".{path.name}.partial")
    try:
        if rank == 0:
            shutil.rmtree(hidden, ignore_errors=True)
            for part in ("model", "optimizer", "codec"):
                (hidden / part).mkdir(parents=True)
        together()
        name = f"worker-{rank:05d}.safetensors"
        if model:
            write_safetensors(hidden / "model" / name, model)
        if optimizer or scalars:
            write_safetensors(hidden / "optimizer" / name, optimizer, {"scalars": json.dumps(dict(scalars))})
        if codec:
            write_safetensors(hidden / "codec" / name, codec)
        together()
        if rank == 0:
            with contextlib.suppress(OSError):  # not empty: it is needed
                (hidden / "codec").rmdir()
            files = sorted(hidden.glob("*/*.safetensors"))
            sizes = {one.relative_to(hidden).as_posix(): one.stat().st_size for one in files}
            index = {"format": FORMAT, "files": sizes, "content": dict(content)}
            with open(hidden / "index.json", "w", encoding="utf-8") as file:
                file.write(json.dumps(index, indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            _replace(hidden, path)
        together()
    except OSError as error:
        raise RunError(f"can't write the checkpoint {path}: {error.strerror or error}") from error


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str] | None = None) -> None:
    """One file, on the disk when this returns."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: _alone(value) for name, value in tensors.items()}, path, {"format": "pt", **(about or {})})
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    except (SafetensorError, OSError) as error:
        raise RunError(f"can't write {path}: {error}") from error


def latest(folder: str | Path) -> Path | None:
    """The whole checkpoint with the most steps in a folder, if there is one."""
    folder = Path(folder)
    found = [one for one in folder.iterdir() if _NAME.fullmatch(one.name)] if folder.is_dir() else []
    for one in sorted(found, key=_steps, reverse=True):
        with contextlib.suppress(UsageError):
            Checkpoint.open(one)
            return one
    return None


def prune(folder: str | Path, keep: int) -> None:
    """Remove all but the newest checkpoints of a folder, and what was never finished."""
    folder = Path(folder)
    found = sorted((one for one in folder.iterdir() if _NAME.fullmatch(one.name)), key=_steps, reverse=True)
    for one in [*found[keep:], *folder.glob(".step-*")]:
        shutil.rmtree(one, ignore_errors=True)


@dataclass(slots=True)
class Checkpoint:
    """A whole checkpoint, read piece by piece."""

    path: Path
    """Where it is."""
    content: dict[str, Any]
    """What worker 0 wrote about it: counters, seed, what is trained."""
    _homes: dict[str, dict[str, Path]] = field(repr=False)
    """For each tensor of the model and of the optimiser, its file."""
    _scalars: dict[str, Any] = field(repr=False)
    """The optimiser's values that are no tensors."""

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read the index and the names in every file; an error where a file is missing or not whole."""
        path = Path(path)
        try:
            index = json.loads((path / "index.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DataMissing(f"{path} is no checkpoint: it holds no index.json") from None
        except (OSError, ValueError) as error:
            raise UsageError(f"the checkpoint's {path / 'index.json'} can't be read: {error}") from None
        if not isinstance(index, dict) or index.get("format") != FORMAT:
            raise UsageError(f"{path} is no checkpoint of this version: its format is not {FORMAT!r}")
        homes: dict[str, dict[str, Path]] = {"model": {}, "optimizer": {}, "codec": {}}
        scalars: dict[str, Any] = {}
        for name, size in index["files"].items():
            one = path / name
            if not one.is_file() or one.stat().st_size != size:
                raise UsageError(f"the checkpoint {path} is not whole: {name} is missing or cut short")
            with _opened(one) as file:
                homes[name.partition("/")[0]] |= dict.fromkeys(file.keys(), one)
                scalars |= json.loads((file.metadata() or {}).get("scalars", "{}"))
        return cls(path, index["content"], homes, scalars)

    def model_names(self) -> frozenset[str]:
        """Parameters and buffers that are in it."""
        return frozenset(self._homes["model"])

    def model_tensor(self, name: str) -> torch.Tensor:
        """The full value of a parameter or buffer."""
        return self._read("model", name)

    def optimizer_state(self, name: str) -> dict[str, Any]:
        """All that the optimiser knew of a parameter, tensors in full."""
        ending = f"/{name}"
        names = [one for one in self._homes["optimizer"] if one.partition("/")[2] == name]
        found: dict[str, Any] = {one.removesuffix(ending): self._read("optimizer", one) for one in names}
        return found | {one.partition("/")[0]: v for one, v in self._scalars.items() if one.partition("/")[2] == name}

    def codec_state(self, rank: int) -> dict[str, torch.Tensor]:
        """What a worker's ends of links remembered."""
        path = self.path / "codec" / f"worker-{rank:05d}.safetensors"
        if not path.is_file():
            return {}
        with _opened(path) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict

    def _read(self, part: str, name: str) -> torch.Tensor:
        with _opened(self._homes[part][name]) as file:
            value: torch.Tensor = file.get_tensor(name)
            return value


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is no safetensors file: {error}") from None


def _alone(value: torch.Tensor) -> torch.Tensor:
    """On the CPU, dense and in a storage of its own: safetensors refuses views of one storage."""
    dense = value.detach().cpu().contiguous()
    return dense if dense.untyped_storage().nbytes() == dense.numel() * dense.element_size() else dense.clone()


def _replace(hidden: Path, path: Path) -> None:
    """Give the folder its name; one that has it already is moved away first and then removed."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.rename(path, old)
    os.rename(hidden, path)
    shutil.rmtree(old, ignore_errors=True)
    with contextlib.suppress(OSError):
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _steps(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found.group(1))
