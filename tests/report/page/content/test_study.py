"""A study's folder on the page, also one that was changed by hand."""

from __future__ import annotations

from pathlib import Path

from stagewright.report.page.content.study import study_sections
from stagewright.table import Table


def test_tables_and_what_only_looks_like_one(tmp_path: Path) -> None:
    (tmp_path / "table.md").write_text("# A\n\n## Rates\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n## Not one\n\na | b\n")
    (section,) = study_sections(tmp_path)
    (table,) = section.items
    assert isinstance(table, Table)
    assert (table.title, table.rows) == ("Rates", (("1", "2"),))
    assert [(column.name, column.align) for column in table.columns] == [("a", "left"), ("b", "right")]
