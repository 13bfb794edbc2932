"""A study's folder on the page: its answers, its tables and its figures, as it left them.

study.json          title, questions, command
answers.md          ## a question, then its sentences
table.md            ## a table's title, then the table and its note
figures/NAME.svg    drawn by the study
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from stagewright.report.page.sections import Code, Item, Picture, Prose, Section, Table
from stagewright.report.page.slug import slug

__all__ = ["study_sections"]

_HEADING = re.compile(r"^## +(.+)$", re.MULTILINE)
_ROW = re.compile(r"^\s*\|", re.MULTILINE)
_MOST_BYTES = 1_500_000  # of a figure


def study_sections(folder: Path) -> tuple[Section, ...]:
    """What a study concluded; one sentence where it has not."""
    about = _about(folder)
    title = str(about.get("title") or about.get("study") or folder.name)
    name = f"study-{slug(folder.name)}"
    items: list[Item] = [Code(title="Made by", text=str(about["command"]))] if about.get("command") else []
    prose = []
    if about.get("status") not in (None, "done"):
        prose.append(f"This study is {about['status']}: parts of it are missing.")
    answers = _parts(folder / "answers.md")
    tables = _parts(folder / "table.md")
    items += [_table(heading, body) for heading, body in tables if _ROW.search(body)]
    items += _pictures(folder / "figures")
    sections = [Section(name=name, title=title, prose=tuple(prose), items=tuple(items))]
    if answers:
        told = tuple(Prose(title=question, paragraphs=_paragraphs(body)) for question, body in answers)
        sections.insert(0, Section(name=f"{name}-answers", title=f"{title}: answers", items=told))
    elif not tables:
        nothing = "It has concluded nothing yet: neither answers.md nor table.md is there."
        sections = [Section(name=name, title=title, prose=(*prose, nothing), items=tuple(items))]
    return tuple(sections)


def _about(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _parts(path: Path) -> list[tuple[str, str]]:
    """Headings of a Markdown file with what is below each."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return []
    pieces = _HEADING.split(text)
    return [(heading.strip(), body.strip()) for heading, body in zip(pieces[1::2], pieces[2::2], strict=True)]


def _paragraphs(body: str) -> tuple[str, ...]:
    return tuple(" ".join(one.split()) for one in re.split(r"\n\s*\n", body) if one.strip())


def _table(title: str, body: str) -> Table:
    """A Markdown table; what is below it is its note."""
    lines = [line.strip() for line in body.splitlines() if line.strip()]
    rows = [_cells(line) for line in lines if line.startswith("|")]
    note = " ".join(line for line in lines if not line.startswith("|"))
    head, rule, *cells = rows if len(rows) > 1 else [*rows, []]
    right = frozenset(at for at, mark in enumerate(rule) if mark.endswith(":"))
    width = len(head)
    return Table(
        title=title,
        head=tuple(head),
        rows=tuple(tuple([*row, *[""] * width][:width]) for row in cells),
        right=right,
        note=note,
    )


def _cells(line: str) -> list[str]:
    cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
    return [cell.strip().replace("\\|", "|") for cell in cells]


def _pictures(folder: Path) -> list[Picture]:
    """Each figure once: as PNG, which can hold no script, or else as SVG, which an image element never runs."""
    found = []
    for path in sorted(folder.glob("*.png")) + sorted(folder.glob("*.svg")):
        if path.suffix == ".svg" and path.with_suffix(".png").is_file():
            continue
        if path.is_file() and path.stat().st_size <= _MOST_BYTES:
            kind = "image/png" if path.suffix == ".png" else "image/svg+xml"
            found.append(Picture(caption=path.stem.replace("-", " "), content=path.read_bytes(), kind=kind))  # type: ignore[arg-type]
    return found
