"""Fold the long tables of reference pages and records of studies: a hook of mkdocs.

| field | type |  ─►  ▸ 12 rows     the table stays on the page, behind a line that opens
"""

from __future__ import annotations

import re
from typing import Any

FOLDED = ("json.md", "studies/measured/")
_MIN_ROWS = 8
_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Fold each long table of the page."""
    return _TABLE.sub(_fold, markdown) if page.file.src_uri.startswith(FOLDED) else markdown


def _fold(table: re.Match[str]) -> str:
    rows = table[0].count("\n") - 2  # less head and rule
    if rows < _MIN_ROWS:
        return table[0]
    return f'<details markdown="1"><summary>{rows} rows</summary>\n\n{table[0]}\n</details>\n'
