"""Profiles on disk: one JSON file for each model, input shape, device and way of measuring.

    {"format": 2, "key": {"model": "deit-small", "torch version": "2.13.0", …}, "profile": {…}}

The file's name stands for what was asked (`_ASKED`). The rest of the key (the model's structure, the
hardware, the library versions) may change under the same name: then the file is stale and refused, and the
difference is told.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stagewright.errors import CacheError
from stagewright.profile.value import Profile

__all__ = ["ProfileCache", "default_cache_folder"]

_FORMAT = 2
_ASKED = ("model", "mode", "inputs", "device", "threads", "training", "units", "weights")


def default_cache_folder() -> Path:
    """`STAGEWRIGHT_CACHE`, or else the user's cache folder."""
    own = os.environ.get("STAGEWRIGHT_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path("~/.cache").expanduser()) / "stagewright"


class ProfileCache:
    """The cached profiles in one folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (default_cache_folder() if folder is None else folder) / "profiles"

    def path(self, key: Mapping[str, str]) -> Path:
        """The file for what the key asks for."""
        asked = json.dumps([key[name] for name in _ASKED])
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", key["model"]).strip("-.")[:60]
        return self.folder / f"{readable}-{hashlib.sha256(asked.encode()).hexdigest()[:16]}.json"

    def load(self, key: Mapping[str, str]) -> tuple[Profile | None, str]:
        """The cached profile, or None and why the file that is there was refused ("" where there is none)."""
        path = self.path(key)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                return None, f"{path} has format {content['format']}, not {_FORMAT}"
            difference = _difference(content["key"], key)
            if difference:
                return None, f"{path} is stale: {difference}"
            return replace(Profile.from_dict(content["profile"]), source="cache"), ""
        except (FileNotFoundError, NotADirectoryError):
            return None, ""
        except OSError as error:
            return None, f"{path} can't be read: {error.strerror}"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return None, f"{path} is damaged: {type(error).__name__}: {error}"

    def check_writable(self) -> None:
        """Raises CacheError where a profile could not be saved."""
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass

    def save(self, key: Mapping[str, str], profile: Profile) -> Path:
        """Writes the profile, at once: a reader sees the old file or the new one, never half of one."""
        path = self.path(key)
        content: dict[str, Any] = {"format": _FORMAT, "key": dict(key), "profile": profile.to_dict()}
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=".", suffix=".tmp")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump(content, file, indent=1)
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        return path

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CacheError(
                f"can't write profiles to {self.folder} ({error.strerror or error}); "
                "use --no-cache, or set STAGEWRIGHT_CACHE to a folder that can be written"
            ) from error


def _difference(stored: Mapping[str, str], asked: Mapping[str, str]) -> str:
    """What the keys differ in, with both values."""
    differing = [name for name in {**stored, **asked} if stored.get(name) != asked.get(name)]
    return "; ".join(f"{name} was {stored.get(name, 'none')}, now {asked.get(name, 'none')}" for name in differing)
