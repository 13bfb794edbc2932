"""A cache of measurements: one JSON file for each key.

    {"format": 2, "key": {"model": "deit-small", "torch version": "2.13.0", …}, "profile": {…}}

`NAME_KEYS` determine the file's name. The rest of the key (the model's structure, the hardware, library versions) may
change under the same name: then the file is stale, and ``load`` says in what it differs. A measurement with more
repeats than requested is valid.
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

from stagewright.errors import CacheError, UsageError
from stagewright.files.atomic import replace_text
from stagewright.files.json_values import read_object

NAME_KEYS = ("model", "mode", "inputs", "device", "threads", "training", "units", "weights", "part")


def default_cache_folder() -> Path:
    """Return `STAGEWRIGHT_CACHE`, or the user's cache folder."""
    configured = os.environ.get("STAGEWRIGHT_CACHE")
    if configured:
        return Path(configured).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "stagewright"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """The content of a valid cache file."""

    content: dict[str, Any]
    age_s: float


class KeyedCache:
    """The cache files of one kind in one folder."""

    def __init__(self, folder: Path | None, kind: str, version: int, name_keys: tuple[str, ...] = NAME_KEYS) -> None:
        self.folder = (default_cache_folder() if folder is None else folder) / kind
        self._format, self._name_keys = version, name_keys

    def path(self, key: Mapping[str, str]) -> Path:
        """Return the file of a key."""
        identity = json.dumps([key[name] for name in self._name_keys])
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", key["model"]).strip("-.")[:60]
        return self.folder / f"{readable}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"

    def load(self, key: Mapping[str, str]) -> tuple[CacheEntry | None, str]:
        """Load an entry, or None and the reason why the file is not valid ("" where it does not exist)."""
        path = self.path(key)
        try:
            content = read_object(path)
            if content["format"] != self._format:
                return None, f"{path} has format {content['format']}, not {self._format}"
            difference = _difference(content["key"], key)
            if difference:
                return None, f"{path} is stale: {difference}"
            return CacheEntry(content=content, age_s=max(0.0, time.time() - path.stat().st_mtime)), ""
        except (FileNotFoundError, NotADirectoryError):
            return None, ""
        except OSError as error:
            return None, f"{path} can't be read: {error.strerror}"
        except UsageError as error:
            return None, f"the cache is damaged: {error}"
        except (ValueError, OverflowError, KeyError, TypeError, AttributeError) as error:
            return None, self.damaged(key, error)

    def damaged(self, key: Mapping[str, str], error: Exception) -> str:
        """Say that the content of the file is damaged."""
        return f"{self.path(key)} is damaged: {type(error).__name__}: {error}"

    def check_writable(self) -> None:
        """Raise CacheError where a file could not be saved."""
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass

    def save(self, key: Mapping[str, str], content: Mapping[str, Any]) -> Path:
        """Write an entry atomically."""
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
                "use --cache-dir, or set STAGEWRIGHT_CACHE, with a folder that can be written"
            ) from error


def _difference(stored: Mapping[str, str], requested: Mapping[str, str]) -> str:
    """List the differences of two keys, with both values."""
    differing = [name for name in {**stored, **requested} if not _matches(name, stored.get(name), requested.get(name))]
    return "; ".join(f"{name} was {stored.get(name, 'none')}, now {requested.get(name, 'none')}" for name in differing)


def _matches(name: str, stored: str | None, requested: str | None) -> bool:
    if name == "repeats" and stored is not None and requested is not None:
        return int(stored) >= int(requested)
    return stored == requested
