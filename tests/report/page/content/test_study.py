"""The section of a study: summary, figure, then each answer with its tables."""

from __future__ import annotations

from pathlib import Path

from made_pages import make_study
from stagewright.report.page.content.study import read_run_names, study_section
from stagewright.report.page.sections import Card, Code, Picture, Prose
from stagewright.table import Table


def shown(item: object) -> str:
    match item:
        case Card():
            return "card"
        case Picture():
            return f"figure {item.content.decode()}"
        case Prose():
            return f"answer {item.title}"
        case Table():
            return f"table {item.title}"
        case _:
            return "command" if isinstance(item, Code) else "?"


def test_summary_comes_first_and_each_table_once_beside_its_answer(tmp_path: Path) -> None:
    section = study_section(make_study(tmp_path / "study"))
    order = [
        "card",
        "figure bars",
        "answer Which policy?",
        "table B",
        "answer Why?",
        "figure why",
        "table A",
        "command",
    ]
    assert [shown(item) for item in section.items] == order
    card, picture, _, table, *_ = section.items
    assert card == Card(title="Summary", rows=(("Measured", "1.6 ×"), ("Ideal", "2 ×")))
    assert isinstance(picture, Picture)
    assert picture.caption == "All bars."
    assert isinstance(table, Table)
    assert [(column.name, column.align) for column in table.columns] == [("a", "left"), ("n", "right")]
    assert (table.rows, table.notes) == ((("x", "2"),), ("A note.",))


def test_a_study_without_findings_says_so(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study")
    (folder / "findings.json").unlink()
    section = study_section(folder)
    assert section.prose == ("This study has no findings yet: there is no findings.json. Its command continues it.",)
    assert [shown(item) for item in section.items] == ["command"]
    assert read_run_names(folder) == {}


def test_a_figure_that_is_gone_is_left_out(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study", summary=[])
    (folder / "figures" / "bars.png").unlink()
    assert [shown(item) for item in study_section(folder).items][:2] == ["figure why", "answer Which policy?"]
