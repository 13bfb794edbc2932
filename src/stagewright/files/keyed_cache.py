"""What was measured, kept as one JSON file for each thing that was asked.

    {"format": 2, "key": {"model": "deit-small", "torch version": "2.13.0", …}, "profile": {…}}

The file's name stands for what was asked (`ASKED`). The rest of the key (the model's structure, the hardware, the
library versions) may change under the same name: then the file is stale and refused, and the difference is told. What
was measured in more rounds than are asked for is as good.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagewright.errors import CacheError
from stagewright.files.atomic import replace_text

__all__ = ["ASKED", "Kept", "KeyedFiles", "default_cache_folder"]

ASKED = ("model", "mode", "inputs", "device", "threads", "training", "units", "weights", "part")


def default_cache_folder() -> Path:
    """`STAGEWRIGHT_CACHE`, or else the user's cache folder."""
    own = os.environ.get("STAGEWRIGHT_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path("~/.cache").expanduser()) / "stagewright"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The content of a file that is still true."""

    content: dict[str, Any]
    """What was saved."""
    age_s: float
    """How long ago that was."""


class KeyedFiles:
    """The files of one kind in one folder."""

    def __init__(self, folder: Path | None, kind: str, number: int, asked: tuple[str, ...] = ASKED) -> None:
        self.folder = (default_cache_folder() if folder is None else folder) / kind
        self._format, self._asked = number, asked

    def path(self, key: Mapping[str, str]) -> Path:
        """The file for what the key asks for."""
        asked = json.dumps([key[name] for name in self._asked])
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", key["model"]).strip("-.")[:60]
        return self.folder / f"{readable}-{hashlib.sha256(asked.encode()).hexdigest()[:16]}.json"

    def load(self, key: Mapping[str, str]) -> tuple[Kept | None, str]:
        """What is kept, or None and why the file that is there was refused ("" where there is none)."""
        path = self.path(key)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != self._format:
                return None, f"{path} has format {content['format']}, not {self._format}"
            difference = _difference(content["key"], key)
            if difference:
                return None, f"{path} is stale: {difference}"
            return Kept(content=content, age_s=max(0.0, time.time() - path.stat().st_mtime)), ""
        except (FileNotFoundError, NotADirectoryError):
            return None, ""
        except OSError as error:
            return None, f"{path} can't be read: {error.strerror}"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return None, self.damaged(key, error)

    def damaged(self, key: Mapping[str, str], error: Exception) -> str:
        """Why the file is refused: what it holds is not what was saved."""
        return f"{self.path(key)} is damaged: {type(error).__name__}: {error}"

    def check_writable(self) -> None:
        """Raises CacheError where a file could not be saved."""
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass

    def save(self, key: Mapping[str, str], content: Mapping[str, Any]) -> Path:
        """Writes the content, at once: a reader sees the old file or the new one, never half of one."""
        path = self.path(key)
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_text(json.dumps({"format": self._format, "key": dict(key), **content}, indent=1), path)
        return path

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CacheError(
                f"can't write {self.folder.name} to {self.folder} ({error.strerror or error}); "
                "use --no-cache, or set STAGEWRIGHT_CACHE to a folder that can be written"
            ) from error


def _difference(stored: Mapping[str, str], asked: Mapping[str, str]) -> str:
    """What the keys differ in, with both values."""
    differing = [name for name in {**stored, **asked} if not _is_same(name, stored.get(name), asked.get(name))]
    return "; ".join(f"{name} was {stored.get(name, 'none')}, now {asked.get(name, 'none')}" for name in differing)


def _is_same(name: str, stored: str | None, asked: str | None) -> bool:
    if name == "repeats" and stored is not None and asked is not None:
        return int(stored) >= int(asked)
    return stored == asked
