"""Sections of a study: answers, tables and figures as read from its folder.

study.json          title, questions, command
answers.md          ## a question, then its answer
table.md            ## a table's title, then the table and its note
figures/NAME.svg    drawn by the study
"""

from __future__ import annotations

import re
from pathlib import Path

from stagewright.files.json_values import read_object_or_empty
from stagewright.report.page.sections import Code, Item, Picture, Prose, Section, slug
from stagewright.table import Column, Table

_HEADING = re.compile(r"^## +(.+)$", re.MULTILINE)
_ROW = re.compile(r"^\s*\|", re.MULTILINE)
_MAX_FIGURE_BYTES = 1_500_000


def study_sections(folder: Path) -> tuple[Section, ...]:
    """Return the sections of a study, or one sentence where it has no findings."""
    study = read_object_or_empty(folder / "study.json")
    title = str(study.get("title") or study.get("study") or folder.name)
    name = f"study-{slug(folder.name)}"
    items: list[Item] = [Code(title="Command", text=str(study["command"]))] if study.get("command") else []
    prose = []
    if study.get("status") not in (None, "done"):
        prose.append(f"This study is {study['status']}: parts of it are missing.")
    answers = _read_headings(folder / "answers.md")
    tables = _read_headings(folder / "table.md")
    items += [_parse_table(heading, body) for heading, body in tables if _ROW.search(body)]
    items += _read_pictures(folder / "figures")
    sections = [Section(name=name, title=title, prose=tuple(prose), items=tuple(items))]
    if answers:
        items_of_answers = tuple(
            Prose(title=question, paragraphs=_split_paragraphs(body)) for question, body in answers
        )
        sections.insert(0, Section(name=f"{name}-answers", title=f"{title}: answers", items=items_of_answers))
    elif not tables:
        empty = "This study has no findings yet: there is neither answers.md nor table.md."
        sections = [Section(name=name, title=title, prose=(*prose, empty), items=tuple(items))]
    return tuple(sections)


def _read_headings(path: Path) -> list[tuple[str, str]]:
    """Return the headings of a Markdown file with the text below each."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return []
    pieces = _HEADING.split(text)
    return [(heading.strip(), body.strip()) for heading, body in zip(pieces[1::2], pieces[2::2], strict=True)]


def _split_paragraphs(body: str) -> tuple[str, ...]:
    return tuple(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", body) if paragraph.strip())


def _parse_table(title: str, body: str) -> Table:
    """Parse a Markdown table; text below it is its note."""
    lines = [line.strip() for line in body.splitlines() if line.strip()]
    rows = [_split_cells(line) for line in lines if line.startswith("|")]
    note = " ".join(line for line in lines if not line.startswith("|"))
    head, rule, *cells = rows if len(rows) > 1 else [*rows, []]
    is_right = [mark.endswith(":") for mark in rule] + [False] * len(head)
    width = len(head)
    return Table(
        title=title,
        columns=tuple(
            Column(name, align="right" if right else "left") for name, right in zip(head, is_right, strict=False)
        ),
        rows=tuple(tuple([*row, *[""] * width][:width]) for row in cells),
        notes=(note,) if note else (),
    )


def _split_cells(line: str) -> list[str]:
    cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
    return [cell.strip().replace("\\|", "|") for cell in cells]


def _read_pictures(folder: Path) -> list[Picture]:
    """Read each figure once: PNG, which can't contain scripts, or else SVG, whose scripts an <img> never runs."""
    pictures = []
    for path in sorted(folder.glob("*.png")) + sorted(folder.glob("*.svg")):
        if path.suffix == ".svg" and path.with_suffix(".png").is_file():
            continue
        if path.is_file() and path.stat().st_size <= _MAX_FIGURE_BYTES:
            kind = "image/png" if path.suffix == ".png" else "image/svg+xml"
            pictures.append(Picture(caption=path.stem.replace("-", " "), content=path.read_bytes(), kind=kind))  # type: ignore[arg-type]
    return pictures
