"""The section of a study: its summary, its first figure, then each answer with its tables and figures.

study.json          title, command, status
findings.json       summary, answers, tables, figures, and names of its runs, as the study wrote them
figures/NAME.svg    drawn by the study
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stagewright.files.json_values import read_object_or_empty
from stagewright.report.page.sections import Card, Code, Item, Picture, Prose, Section, slug
from stagewright.table import Column, Table

_MAX_FIGURE_BYTES = 1_500_000


def study_section(folder: Path) -> Section:
    """Return the section of a study, with one sentence where it has no findings."""
    study, findings = read_object_or_empty(folder / "study.json"), read_object_or_empty(folder / "findings.json")
    title = str(study.get("title") or study.get("study") or folder.name)
    prose = []
    if study.get("status") not in (None, "done"):
        prose.append(f"This study is {study['status']}: parts of it are missing.")
    if not findings:
        prose.append("This study has no findings yet: there is no findings.json. Its command continues it.")
    items = [*_items(folder, findings)] if findings else []
    if study.get("command"):
        items.append(Code(title="Command", text=str(study["command"])))
    return Section(name=f"study-{slug(folder.name)}", title=title, prose=tuple(prose), items=tuple(items))


def read_run_names(folder: Path) -> dict[str, str]:
    """Return the names of a study's runs by run folder."""
    return dict(read_object_or_empty(folder / "findings.json").get("runs") or {})


def _items(folder: Path, findings: Mapping[str, Any]) -> Iterator[Item]:
    if findings["summary"]:
        yield Card(title="Summary", rows=tuple((str(name), str(text)) for name, text in findings["summary"]))
    pictures = {
        figure["name"]: picture
        for figure in findings["figures"]
        if (picture := _read_picture(folder / "figures", figure["name"], figure["caption"])) is not None
    }
    tables = {table["title"]: _table(table) for table in findings["tables"]}
    if pictures:
        yield pictures.pop(next(iter(pictures)))
    for answer in findings["answers"]:
        yield Prose(title=answer["question"], paragraphs=tuple(answer["sentences"]))
        # A table or figure of two answers is shown with the first.
        yield from (table for title in answer["tables"] if (table := tables.pop(title, None)) is not None)
        yield from (picture for name in answer["figures"] if (picture := pictures.pop(name, None)) is not None)
    yield from tables.values()
    yield from pictures.values()


def _table(content: Mapping[str, Any]) -> Table:
    return Table(
        title=content["title"],
        columns=tuple(Column(name, align) for name, align in zip(content["columns"], content["align"], strict=True)),
        rows=tuple(tuple(row) for row in content["rows"]),
        notes=tuple(content["notes"]),
    )


def _read_picture(folder: Path, name: str, caption: str) -> Picture | None:
    """Read a figure: PNG, which can't contain scripts, or else SVG, whose scripts an <img> never runs."""
    kinds: Sequence[tuple[str, Any]] = ((".png", "image/png"), (".svg", "image/svg+xml"))
    for suffix, kind in kinds:
        path = folder / f"{name}{suffix}"
        if path.is_file() and path.stat().st_size <= _MAX_FIGURE_BYTES:
            return Picture(caption=caption, content=path.read_bytes(), kind=kind)
    return None
