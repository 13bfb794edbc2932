from __future__ import annotations

import os
from pathlib import Path

import pytest

from stagewright.errors import UsageError
from stagewright.files.atomic import save_text


def test_replaces(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_text("one\n", path)
    save_text("zwei, Ω\n", path)
    assert path.read_bytes() == "zwei, Ω\n".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_text("old", path)
    with pytest.raises(UnicodeEncodeError):
        save_text("\ud800", path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(UsageError, match="can't write"):
        save_text("x", tmp_path / "file")
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_the_content_is_on_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash between the two would leave an empty file under the final name."""
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        calls.append(os.readlink(f"/proc/self/fd/{descriptor}").rpartition("/")[2][:6])
        fsync(descriptor)

    def recorded_replace(source: Path, target: Path) -> None:
        calls.append(f"replace {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    save_text("x", tmp_path / "file")
    assert calls == [".file.", "replace file"]
