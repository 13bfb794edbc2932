"""The report page as Markdown, for pull requests: paragraphs and tables; a bar chart becomes a table."""

from __future__ import annotations

import re

from stagewright.report.page.charts.axis import format_tick
from stagewright.report.page.sections import BarChart, Card, Code, Fold, Item, Page, Picture, Prose, Section
from stagewright.report.render.markdown import escape_markdown, table_markdown
from stagewright.table import Table, number_columns, text_columns


def page_markdown(page: Page) -> str:
    """Render the whole file."""
    head = f"# {escape_markdown(page.title)}\n\n{escape_markdown(page.subtitle)}\n"
    footer = f"\n{escape_markdown(page.footer)}\n" if page.footer else ""
    return head + "".join(map(_render_section, page.sections)) + footer


def _render_section(section: Section) -> str:
    paragraphs = [f"\n{escape_markdown(paragraph)}\n" for paragraph in section.prose]
    body = "".join([*paragraphs, *map(_render_item, section.items)])
    # A section that has only curves is left out.
    return f"\n## {escape_markdown(section.title)}\n{body}" if body else ""


def _render_item(item: Item) -> str:
    match item:
        case Table():
            return table_markdown(item)
        case BarChart():
            return "" if item.in_table else table_markdown(_chart_table(item))
        case Code():
            ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", item.text)), default=0))
            title = f"\n{escape_markdown(item.title)}\n" if item.title else ""
            return f"{title}\n{ticks}text\n{item.text.rstrip()}\n{ticks}\n"
        case Fold():
            body = "".join(map(_render_item, item.items))
            title = escape_markdown(item.title)
            return f"\n<details><summary>{title}</summary>\n{body}\n</details>\n" if body else ""
        case Card():
            return "".join(f"\n**{escape_markdown(name)}**: {escape_markdown(text)}\n" for name, text in item.rows)
        case Prose():
            paragraphs = (f"\n{escape_markdown(paragraph)}\n" for paragraph in item.paragraphs)
            title = f"\n**{escape_markdown(item.title)}**\n" if item.title else ""
            return title + "".join(paragraphs)
        case Picture():
            return f"\n*{escape_markdown(item.caption)}* (in the page)\n"
        case _:
            return ""  # line charts and timelines have no text form


def _chart_table(chart: BarChart) -> Table:
    """Tabulate the numbers of a bar chart."""
    has_marks = any(bar.mark is not None for bar in chart.bars)
    names = [name for name, _ in chart.legend]
    rows = []
    for bar in chart.bars:
        sizes = {part.name: format_tick(part.end - part.start, chart.quantity) for part in bar.parts}
        mark = [] if not has_marks else ["–" if bar.mark is None else format_tick(bar.mark, chart.quantity)]
        rows.append((bar.label, *(sizes.get(name, "–") for name in names), bar.text, *mark))
    headings = (*names, "total" if names else "value", *([chart.mark_name] if has_marks else []))
    return Table(title=chart.title, columns=(*text_columns(""), *number_columns(*headings)), rows=tuple(rows))
