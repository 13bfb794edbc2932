"""Checkpoints: full tensors under the plain model's names, so that training can resume under any other plan.

    step-00000120/
      index.json                         format, counters, files with size and SHA-256; written last
      model/worker-00000.safetensors     parameters and buffers that worker 0 owns, by the model's names
      optimizer/worker-00000.safetensors its optimizer states, as "exp_avg/NAME"; other values in the header
      codec/worker-00000.safetensors     states of stateful codecs at its ends of links; valid for the same links only

Written into a hidden folder and renamed when every file is on disk: a folder with the final name is complete. Only
safetensors and JSON: nothing is pickled. ``torch.distributed.checkpoint`` with its default storage reads ``.metadata``
with pickle and its planners exchange pickles, so it is not used for writing; but its ``HuggingFaceStorageReader``
reads ``model/``, and so does ``--weights`` for a model without a configuration.
Workers on several machines need a shared file system.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stagewright.engine.state.tensor_file import TensorStream, write_tensors
from stagewright.errors import DataMissing, RunError, UsageError
from stagewright.files.json_values import parse_json, read_object
from stagewright.files.stored_tensor import StoredTensor, open_safetensors

FORMAT = "stagewright checkpoint 2"
_NAME = re.compile(r"step-(\d+)")
_FILE = re.compile(r"(model|optimizer|codec)/worker-\d+\.safetensors")


def checkpoint_name(step: int) -> str:
    """Return the folder name of a checkpoint."""
    return f"step-{step:08d}"


def write_checkpoint(
    path: str | Path,
    *,
    rank: int,
    barrier: Callable[[], None],
    model: Mapping[str, torch.Tensor] | TensorStream,
    optimizer: Mapping[str, torch.Tensor] | TensorStream,
    scalars: Mapping[str, Any],
    content: Mapping[str, Any],
    codec: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write what this worker owns; every worker must call this, and worker 0 publishes the folder.

    ``barrier`` waits for all workers. ``optimizer`` and ``scalars`` (optimizer states that are not tensors) are keyed
    ``KEY/PARAMETER``; ``content`` is used on worker 0.
    """
    path = Path(path)
    hidden = path.with_name(f".{path.name}.partial")
    try:
        if rank == 0:
            shutil.rmtree(hidden, ignore_errors=True)
            for folder in ("model", "optimizer", "codec"):
                (hidden / folder).mkdir(parents=True)
        barrier()
        name = f"worker-{rank:05d}.safetensors"
        _write_hashed(hidden / "model" / name, model)
        _write_hashed(hidden / "optimizer" / name, optimizer, {"scalars": json.dumps(dict(scalars))} if scalars else {})
        _write_hashed(hidden / "codec" / name, codec or {})
        barrier()
        if rank == 0:
            with contextlib.suppress(OSError):  # not empty: some worker wrote codec states
                (hidden / "codec").rmdir()
            files = sorted(hidden.glob("*/*.safetensors"))
            about = {path.relative_to(hidden).as_posix(): _describe_file(path) for path in files}
            index = {"format": FORMAT, "files": about, "content": dict(content)}
            with open(hidden / "index.json", "w", encoding="utf-8") as file:
                file.write(json.dumps(index, indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            _replace(hidden, path)
        barrier()
    except OSError as error:
        raise RunError(f"can't write the checkpoint {path}: {error.strerror or error}") from error


def _write_hashed(
    path: Path, tensors: Mapping[str, torch.Tensor] | TensorStream, metadata: Mapping[str, str] | None = None
) -> None:
    """Write one file, if there is anything to write, and next to it its hash, which worker 0 moves to the index."""
    stream = tensors if isinstance(tensors, TensorStream) else TensorStream.of(tensors)
    if stream.shapes or metadata:
        _digest_file(path).write_text(write_tensors(path, stream, metadata), encoding="ascii")
    else:
        for _ in stream.values:  # take part in gathering what other workers write
            pass


def latest(folder: str | Path) -> Path | None:
    """Return the complete checkpoint with the most steps in a folder, or None."""
    for path in _newest_first(Path(folder)):
        with contextlib.suppress(UsageError):
            Checkpoint.open(path)
            return path
    return None


def prune(folder: str | Path, keep: int) -> None:
    """Remove all but the newest checkpoints of a folder, and incomplete ones."""
    for path in _newest_first(Path(folder))[keep:]:
        with contextlib.suppress(OSError):  # a hidden folder is never taken for a checkpoint, also if this is killed
            os.rename(path, path.with_name(f".{path.name}.old"))
    for path in Path(folder).glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


@dataclass(slots=True)
class Checkpoint:
    """A complete checkpoint; tensors are read on demand."""

    path: Path
    content: dict[str, Any]
    """Counters, seed and training settings, written by worker 0."""
    _files: dict[str, dict[str, Path]] = field(repr=False)
    """The file of each tensor, by ``model``, ``optimizer`` and ``codec``."""
    _scalars: dict[str, Any] = field(repr=False)
    """Optimizer states that are not tensors."""
    _digests: dict[str, str] = field(repr=False)
    """SHA-256 of each file."""

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read the index and the tensor names of every file; raise if a file is missing or truncated."""
        path = Path(path)
        try:
            index = read_object(path / "index.json")
        except FileNotFoundError:
            raise DataMissing(f"{path} is not a checkpoint: it has no index.json") from None
        if index.get("format") != FORMAT:
            raise UsageError(f"{path} is not a checkpoint of this version: its format is not {FORMAT!r}")
        about, content = index.get("files"), index.get("content")
        if not isinstance(about, dict) or not isinstance(content, dict):
            raise UsageError(f"{path / 'index.json'} is damaged: it must list the files and the content")
        files: dict[str, dict[str, Path]] = {"model": {}, "optimizer": {}, "codec": {}}
        scalars: dict[str, Any] = {}
        digests: dict[str, str] = {}
        for name, file_about in about.items():
            size, digests[name] = _read_about(path, name, file_about)
            file_path = path / name
            if not file_path.is_file() or file_path.stat().st_size != size:
                raise UsageError(f"the checkpoint {path} is incomplete: {name} is missing or truncated")
            with open_safetensors(file_path) as file:
                files[name.partition("/")[0]] |= dict.fromkeys(file.keys(), file_path)
                scalars |= _read_scalars(file_path, file)
        return cls(path, content, files, scalars, digests)

    @property
    def caller(self) -> dict[str, Any]:
        """What the caller of ``Trainer.save`` has added."""
        caller = self.content.get("caller")
        if not isinstance(caller, dict):
            raise UsageError(f"{self.path / 'index.json'} is damaged: its content has no caller's part")
        return caller

    def verify(self, share: int = 0, num_shares: int = 1) -> None:
        """Raise UsageError where a file is not the one that was written; each of several workers checks a share."""
        for name in sorted(self._digests)[share::num_shares]:
            try:
                with open(self.path / name, "rb") as file:
                    actual = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise UsageError(f"can't read {self.path / name}: {error.strerror}") from None
            if actual != self._digests[name]:
                raise UsageError(
                    f"the checkpoint {self.path} is damaged: {name} has the SHA-256 {actual[:12]}…, but was written "
                    f"with {self._digests[name][:12]}…; resume from another one with --from"
                )

    def model_names(self) -> frozenset[str]:
        """Return the names of its parameters and buffers."""
        return frozenset(self._files["model"])

    def model_tensor(self, name: str) -> torch.Tensor:
        """Read the full value of a parameter or buffer."""
        return self.stored_model_tensor(name).read()

    def stored_model_tensor(self, name: str) -> StoredTensor:
        """Return where a parameter or buffer is stored."""
        return StoredTensor(self._files["model"][name], name)

    def optimizer_state(self, name: str) -> dict[str, Any]:
        """Read the optimizer states of a parameter, with full tensors."""
        state = self.stored_optimizer_state(name)
        return {key: value.read() if isinstance(value, StoredTensor) else value for key, value in state.items()}

    def stored_optimizer_state(self, name: str) -> dict[str, StoredTensor | Any]:
        """Return where the optimizer states of a parameter are stored, and those that are not tensors."""
        state: dict[str, Any] = {}
        for key, path in self._files["optimizer"].items():
            if key.partition("/")[2] == name:
                state[key.partition("/")[0]] = StoredTensor(path, key)
        return state | {k.partition("/")[0]: value for k, value in self._scalars.items() if k.partition("/")[2] == name}

    def codec_state(self, rank: int) -> dict[str, torch.Tensor]:
        """Read the codec states of a worker's ends of links."""
        path = self.path / "codec" / f"worker-{rank:05d}.safetensors"
        if not path.is_file():
            return {}
        with open_safetensors(path) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def _describe_file(path: Path) -> dict[str, Any]:
    """Return size and hash of a file; its worker has left the hash next to it."""
    digest_file = _digest_file(path)
    digest = digest_file.read_text(encoding="ascii")
    digest_file.unlink()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _digest_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _read_about(path: Path, name: str, about: object) -> tuple[int, str]:
    """Return size and hash of a file in the index."""
    if not _FILE.fullmatch(name):
        raise UsageError(f"{path / 'index.json'} is damaged: {name!r} is not a file of a checkpoint")
    size, digest = (about.get("bytes"), about.get("sha256")) if isinstance(about, dict) else (None, None)
    if not isinstance(size, int) or not isinstance(digest, str):
        raise UsageError(f"{path / 'index.json'} is damaged: {name} needs bytes and sha256")
    return size, digest


def _read_scalars(path: Path, file: Any) -> dict[str, Any]:
    """Return the values in a file's header."""
    try:
        scalars = parse_json((file.metadata() or {}).get("scalars", "{}"))
    except ValueError as error:
        raise UsageError(f"{path} has a damaged header: {error}") from None
    if not isinstance(scalars, dict):
        raise UsageError(f"{path} has a damaged header: scalars must be an object")
    return scalars


def _replace(hidden: Path, path: Path) -> None:
    """Rename the folder to its final name; an existing one is moved away first and then removed."""
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


def _newest_first(folder: Path) -> list[Path]:
    """Return the checkpoint folders in ``folder``, the one with the most steps first."""
    matches = [(_NAME.fullmatch(path.name), path) for path in (folder.iterdir() if folder.is_dir() else ())]
    steps = [(int(match.group(1)), path) for match, path in matches if match]
    return [path for _, path in sorted(steps, reverse=True)]
