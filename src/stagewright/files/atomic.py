"""Atomic file writes: a reader sees the old file or the new one, never a part."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from stagewright.errors import UsageError


def save_text(content: str, path: str | Path) -> None:
    """Write a text file atomically; UsageError where it can't be written."""
    path = Path(path)
    if path.is_dir():
        raise UsageError(f"can't write {path}: it is a folder; name a file in it")
    try:
        replace_text(content, path)
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror}") from None


def replace_text(content: str, path: Path) -> None:
    """Write a text file atomically; raises OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8", newline="\n") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or a crash may leave an empty file under the final name
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
