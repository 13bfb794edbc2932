"""A page as Markdown: its sentences and tables, ready for a pull request; a chart becomes the table behind it."""

from __future__ import annotations

import re

from stagewright.report.page.charts.axis import label
from stagewright.report.page.sections import BarChart, Code, Fold, Item, Page, Picture, Prose, Section, Table

__all__ = ["page_markdown"]

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#~])")


def page_markdown(page: Page) -> str:
    """The whole file."""
    head = f"# {_text(page.title)}\n\n{_text(page.subtitle)}\n"
    return head + "".join(_section(one) for one in page.sections) + (f"\n{_text(page.footer)}\n" if page.footer else "")


def _section(section: Section) -> str:
    body = "".join([*(f"\n{_text(one)}\n" for one in section.prose), *(_item(one) for one in section.items)])
    return f"\n## {_text(section.title)}\n{body}" if body else ""  # a section of curves alone is left out


def _item(item: Item) -> str:
    match item:
        case Table():
            note = f"\n{_text(item.note)}\n" if item.note else ""
            return (f"\n**{_text(item.title)}**\n" if item.title else "") + _table(item) + note
        case BarChart():
            return "" if item.in_table else f"\n**{_text(item.title)}**\n" + _table(_bars(item))
        case Code():
            ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", item.text)), default=0))
            title = f"\n{_text(item.title)}\n" if item.title else ""
            return f"{title}\n{ticks}text\n{item.text.rstrip()}\n{ticks}\n"
        case Fold():
            inside = "".join(_item(one) for one in item.items)
            return f"\n<details><summary>{_text(item.title)}</summary>\n{inside}\n</details>\n" if inside else ""
        case Prose():
            return f"\n**{_text(item.title)}**\n" + "".join(f"\n{_text(one)}\n" for one in item.paragraphs)
        case Picture():
            return f"\n*{_text(item.caption)}* (in the page)\n"
        case _:
            return ""  # curves and timelines can't be read as text


def _table(table: Table) -> str:
    rule = "".join(" ---: |" if at in table.right else " --- |" for at in range(len(table.head)))
    rows = []
    for at, row in enumerate(table.rows):
        first, *rest = (_text(cell) for cell in row)
        rows.append([f"**{first}**" if at in table.marked and first else first, *rest])
    lines = ["| " + " | ".join(_text(name) for name in table.head) + " |", "|" + rule]
    return "\n" + "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def _bars(chart: BarChart) -> Table:
    """The numbers that a bar chart shows."""
    marked = any(bar.mark is not None for bar in chart.bars)
    names = [name for name, _ in chart.legend]
    rows = []
    for bar in chart.bars:
        sizes = {part.name: label(part.end - part.start, chart.quantity) for part in bar.parts}
        mark = [] if not marked else ["–" if bar.mark is None else label(bar.mark, chart.quantity)]
        rows.append((bar.label, *(sizes.get(name, "–") for name in names), bar.text, *mark))
    head = ("", *names, "in all" if names else "value", *([chart.mark_name] if marked else []))
    return Table(head=head, rows=tuple(rows), right=frozenset(range(1, len(head))))


def _text(text: str) -> str:
    """Text that stays text, on one line."""
    plain = "".join(one if one >= " " else " " for one in text).encode("utf-8", "replace").decode("utf-8")
    return _SPECIAL.sub(r"\\\1", plain).replace("&", "&amp;")
