from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from stagewright.errors import UsageError
from stagewright.report.figures.file import write_figure


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")]
)
def test_the_suffix_is_the_format(tmp_path: Path, suffix: str, start: bytes) -> None:
    path = write_figure(Figure(), tmp_path / f"figure{suffix}")
    assert path.read_bytes().startswith(start)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_same_figure_gives_the_same_file(tmp_path: Path, suffix: str) -> None:
    one, two = (write_figure(Figure(), tmp_path / f"{name}{suffix}") for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("name", ["figure.gif", "figure"])
def test_other_suffixes_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"use one of \.png, \.svg, \.pdf"):
        write_figure(Figure(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no folder .*absent"):
        write_figure(Figure(), tmp_path / "absent" / "figure.png")


def test_a_failure_leaves_nothing_half_written(tmp_path: Path) -> None:
    (tmp_path / "taken.png").mkdir()
    (tmp_path / "taken.png" / "inside").touch()
    with pytest.raises(UsageError, match=r"can't write .*taken\.png"):
        write_figure(Figure(), tmp_path / "taken.png")
    assert [path.name for path in tmp_path.iterdir()] == ["taken.png"]


def test_an_old_file_survives_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "figure.png"
    path.write_bytes(b"old")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(UsageError, match="No space left on device"):
        write_figure(Figure(), path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
