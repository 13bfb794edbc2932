"""docs/pictures/schedules/ shows the orders that the engine executes."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

from stagewright.schedules.rules import SCHEDULES

DOCS = Path(__file__).resolve().parents[2] / "docs"
SCRIPT = DOCS / "make_schedule_pictures.py"


def texts(picture: Path) -> list[str]:
    """Return the texts of a picture in drawing order: numbers in the bars, worker by worker, ticks, the caption.

    Their positions depend on the machine's fonts; their content does not.
    """
    return ["".join(text.itertext()) for text in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_pictures_are_current(tmp_path: Path) -> None:
    script = runpy.run_path(str(SCRIPT))
    drawn = script["draw_all"](tmp_path)
    assert [path.stem for path in drawn] == list(SCHEDULES)
    assert sorted(path.stem for path in script["FOLDER"].iterdir()) == sorted(SCHEDULES)
    for path in drawn:
        committed = texts(script["FOLDER"] / path.name)
        assert committed == texts(path), "run: python docs/make_schedule_pictures.py"
        assert committed.count("7") >= 8  # a forward and a backward of the last micro-batch on each worker


def test_page_shows_all_pictures() -> None:
    page = (DOCS / "schedules.md").read_text(encoding="utf-8")
    assert [name for name in SCHEDULES if f"(pictures/schedules/{name}.svg)" in page] == list(SCHEDULES)
