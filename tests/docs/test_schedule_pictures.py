"""docs/pictures/schedules/ shows the orders that the engine executes."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

from stagewright.schedules.catalog import SCHEDULES

DOCS = Path(__file__).resolve().parents[2] / "docs"
SCRIPT = DOCS / "make_schedule_pictures.py"


def words(picture: Path) -> list[str]:
    """Every text of a picture in the order of drawing: the numbers in the bars, worker by worker, ticks, the caption.

    Where they stand depends on the fonts of the machine; what they say does not.
    """
    return ["".join(one.itertext()) for one in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_pictures_are_current(tmp_path: Path) -> None:
    script = runpy.run_path(str(SCRIPT))
    drawn = script["draw_all"](tmp_path)
    assert [one.stem for one in drawn] == list(SCHEDULES)
    assert sorted(one.stem for one in script["FOLDER"].iterdir()) == sorted(SCHEDULES)
    for one in drawn:
        there = words(script["FOLDER"] / one.name)
        assert there == words(one), "run: python docs/make_schedule_pictures.py"
        assert there.count("7") >= 8  # a forward and a backward of the last micro-batch on each worker


def test_pictures_are_on_the_page() -> None:
    page = (DOCS / "schedules.md").read_text(encoding="utf-8")
    assert [name for name in SCHEDULES if f"(pictures/schedules/{name}.svg)" in page] == list(SCHEDULES)
