"""Folders that a user names: weights, a model of transformers. Looked at without torch, so before anything else."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from stagewright.errors import DataMissing, UsageError

__all__ = ["checked_folder", "local_model", "some"]


def checked_folder(folder: Path, *, config: bool) -> Path:
    """`folder`, or an error that says which file is not there."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise DataMissing(f"the weights folder {str(folder)!r} {what}; give a folder with model.safetensors")
    if config and not (folder / "config.json").is_file():
        raise DataMissing(f"the weights folder {str(folder)!r} holds no config.json; {_holds(folder)}")
    if not any(folder.glob("*.safetensors")):
        raise DataMissing(f"the weights folder {str(folder)!r} holds no *.safetensors file; {_holds(folder)}")
    return folder


def local_model(reference: str) -> Path | None:
    """The folder that a reference (what follows `hf:`) names on this machine; None: it names one on the hub."""
    if not reference:
        raise UsageError("'hf:' names no model; write hf:org/name or hf:/a/folder")
    folder = Path(reference).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise DataMissing(f"the folder {reference!r} holds no config.json, so it is no transformers model")
        return folder
    if reference.startswith((".", "/", "~")) or reference.count("/") > 1:
        raise DataMissing(f"the folder {reference!r} does not exist; give hf:org/name or a folder with config.json")
    return None


def some(names: Iterable[str], separator: str = ", ") -> str:
    """The first few names and how many more there are."""
    names = list(names)
    shown = separator.join(names[:4])
    return shown if len(names) <= 4 else f"{shown}{separator}… ({len(names)} in all)"


def _holds(folder: Path) -> str:
    found = sorted(one.name for one in folder.iterdir())
    return f"it holds {some(found)}" if found else "it is empty"
