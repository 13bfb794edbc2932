"""Folders given by the user: weights, transformers models. Checked without torch, before anything else."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from stagewright.errors import DataMissing, UsageError


def check_folder(folder: Path, *, config: bool) -> Path:
    """Return `folder`; raise DataMissing with the name of a missing file."""
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise DataMissing(f"the weights folder {str(folder)!r} {problem}; give a folder with model.safetensors")
    if config and not (folder / "config.json").is_file():
        raise DataMissing(f"the weights folder {str(folder)!r} has no config.json; {_describe_content(folder)}")
    if not any(folder.glob("*.safetensors")):
        raise DataMissing(f"the weights folder {str(folder)!r} has no *.safetensors file; {_describe_content(folder)}")
    return folder


def local_model(reference: str) -> Path | None:
    """Return the local folder of a reference (the part after `hf:`); None if it is a name on the hub."""
    if not reference:
        raise UsageError("'hf:' needs a model; write hf:org/name or hf:/a/folder")
    folder = Path(reference).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise DataMissing(f"the folder {reference!r} has no config.json, so it is not a transformers model")
        return folder
    if reference.startswith((".", "/", "~")) or reference.count("/") > 1:
        raise DataMissing(f"the folder {reference!r} does not exist; give hf:org/name or a folder with config.json")
    return None


def abbreviate(names: Iterable[str], separator: str = ", ") -> str:
    """List the first few names, and how many there are in total."""
    names = list(names)
    listed = separator.join(names[:4])
    return listed if len(names) <= 4 else f"{listed}{separator}… ({len(names)} in total)"


def _describe_content(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return f"it contains {abbreviate(names)}" if names else "it is empty"
