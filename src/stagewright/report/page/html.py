"""A page as one HTML file: styles, script, charts and data inside, no request to anywhere.

Every text goes through `clean`; data for the script is JSON in which `<`, `>` and `&` are written as escapes, so that
no name can end the element that holds it. A content security policy lets the page's own script run and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from importlib.resources import files

from stagewright.report.page.charts.svg import bar_svg, clean, line_svg
from stagewright.report.page.sections import (
    BarChart,
    Code,
    Fold,
    Item,
    LineChart,
    Page,
    Picture,
    Prose,
    Section,
    Table,
    Timeline,
)
from stagewright.report.palette import color, color_names

__all__ = ["page_html", "script_json"]

_TOOLS = (
    ("closer", "Zoom in"),
    ("wider", "Zoom out"),
    ("step", "One step"),
    ("all", "All steps"),
    ("before", "◀ Step"),
    ("after", "Step ▶"),
)
_HOW = (
    "One row a worker: above what it computes, with the number of the micro-batch; below what it sends, waits for and "
    "sums. Drag to move; zoom with the buttons, with Ctrl and the wheel, with two fingers, or with + and −; point at "
    "an event to see what it is. Dashed lines are where steps begin; time counts from the step that is shown first."
)
_KEYS = (
    ("forward", "stage-0"),
    ("backward", "stage-0-pale"),
    ("recomputation", "share-bubble"),
    ("collective", "share-collective"),
    ("encode, decode", "tone-good"),
    ("waits for a message", "grid"),
    ("optimizer", "muted"),
)


def page_html(page: Page) -> str:
    """The whole file."""
    style, script = _resource("page.css"), _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    links = "".join(f'<a href="#{clean(one.name)}">{clean(one.title)}</a>' for one in page.sections)
    return "".join(
        (
            '<!doctype html>\n<html lang="en" data-theme="auto">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n',
            f"<title>{clean(page.title)}</title>\n<style>\n{_variables()}{style}</style>\n</head>\n<body>\n",
            f"<header><h1>{clean(page.title)}</h1><p class=subtitle>{clean(page.subtitle)}</p></header>\n",
            f'<nav><div><div class="links">{links}</div>',
            '<button id="theme" type="button">Colours: auto</button></div></nav>\n<main>\n',
            *(_section(one) for one in page.sections),
            f"</main>\n<footer>{clean(page.footer)}</footer>\n",
            '<div id="tip" role="status" hidden></div><span id="probe" hidden></span>\n',
            "<noscript><style>.timeline{display:none}</style></noscript>\n",
            f"<script>{script}</script>\n</body>\n</html>\n",
        )
    )


def script_json(data: object) -> str:
    """JSON that can stand in a script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for one in "<>&":
        text = text.replace(one, f"\\u{ord(one):04x}")
    return text


def _variables() -> str:
    """Every colour, for light and for dark."""
    lines = [f"--{name}: light-dark({color(name)}, {color(name, dark=True)});" for name in color_names()]
    return ":root { " + " ".join(lines) + " }\n"


def _section(section: Section) -> str:
    prose = "".join(f"<p>{clean(one)}</p>\n" for one in section.prose)
    inside = [one for item in section.items for one in (item.items if isinstance(item, Fold) else (item,))]
    num_timelines = sum(isinstance(one, Timeline) for one in inside)
    if num_timelines:
        prose = f'<p class="note">{clean(_HOW)}</p>\n{prose}'
    lock = (
        '<label><input type="checkbox" id="together" checked> Runs move together</label>\n' if num_timelines > 1 else ""
    )
    items = "".join(_item(one) for one in section.items)
    if num_timelines:
        items += _legend((name, f"--{paint}", "") for name, paint in _KEYS)
    name, title = clean(section.name), clean(section.title)
    head = f'<section id="{name}" aria-labelledby="{name}-title">\n<h2 id="{name}-title">{title}</h2>\n'
    return f"{head}{prose}{lock}{items}</section>\n"


def _item(item: Item) -> str:
    match item:
        case Table():
            return _table(item)
        case BarChart():
            keys = [(name, f"--{paint}", "") for name, paint in item.legend]
            mark = f'<li><i class="tick-mark"></i>{clean(item.mark_name)}</li>' if item.mark_name else ""
            return _figure(item.name, item.title, "", bar_svg(item) + _legend(keys, mark), item.note)
        case LineChart():
            keys = [(one.name, f"--{one.paint}", "dashed" if one.dashed else "") for one in item.lines]
            legend = _legend(keys) if len(keys) > 1 else ""
            return _figure(
                item.name, item.title, f"{item.y_title} over {item.x_title}", line_svg(item) + legend, item.note
            )
        case Timeline():
            return _timeline(item)
        case Code():
            title = f"<h3>{clean(item.title)}</h3>" if item.title else ""
            button = '<button type="button" class="copy">copy</button>'
            return f'{title}<div class="code"><pre><code>{clean(item.text)}</code></pre>{button}</div>\n'
        case Prose():
            return f"<h3>{clean(item.title)}</h3>" + "".join(f"<p>{clean(one)}</p>\n" for one in item.paragraphs)
        case Picture():
            content = base64.b64encode(item.content).decode("ascii")
            caption = clean(item.caption)
            return (
                f'<figure><figcaption>{caption}</figcaption><img alt="{caption}" loading="lazy" '
                f'src="data:{item.kind};base64,{content}"></figure>\n'
            )
        case Fold():
            inside = "".join(_item(one) for one in item.items)
            return f"<details><summary>{clean(item.title)}</summary>\n{inside}</details>\n"


def _figure(name: str, title: str, axes: str, drawing: str, note: str) -> str:
    beside = f' <span class="axes">({clean(axes)})</span>' if axes else ""
    below = f'<p class="note">{clean(note)}</p>' if note else ""
    return (
        f'<figure data-name="{clean(name)}"><figcaption>{clean(title)}{beside}</figcaption>{drawing}{below}</figure>\n'
    )


def _legend(keys: Iterable[tuple[str, str, str]], more: str = "") -> str:
    items = "".join(
        f'<li><i class="{way}" style="{"border-color" if way else "background"}:var({paint})"></i>{clean(name)}</li>'
        for name, paint, way in keys
    )
    return f'<ul class="legend">{items}{more}</ul>' if items or more else ""


def _table(table: Table) -> str:
    def row(cells: tuple[str, ...], tag: str, style: str = "") -> str:
        inside = "".join(
            f"<{tag}{' class=right' if at in table.right else ''}>{clean(cell)}</{tag}>"
            for at, cell in enumerate(cells)
        )
        return f"<tr{style}>{inside}</tr>"

    caption = f"<caption>{clean(table.title)}</caption>" if table.title else ""
    rows = "".join(row(one, "td", " class=marked" if at in table.marked else "") for at, one in enumerate(table.rows))
    note = f'<p class="note">{clean(table.note)}</p>' if table.note else ""
    head = row(table.head, "th") if any(table.head) else ""
    return f'<div class="scroll"><table>{caption}<thead>{head}</thead><tbody>{rows}</tbody></table></div>{note}\n'


def _timeline(timeline: Timeline) -> str:
    tools = "".join(f'<button type="button" data-act="{act}">{text}</button>' for act, text in _TOOLS)
    note = f'<p class="note">{clean(timeline.note)}</p>' if timeline.note else ""
    title = clean(timeline.title)
    return (
        f'<div class="timeline" data-name="{clean(timeline.name)}"><h3>{title}</h3><div class="tools">{tools}</div>'
        f'<canvas tabindex="0" role="img" aria-label="{title}: what each worker did over time; plus and minus zoom, '
        f'arrows move"></canvas>{note}'
        f'<script type="application/json">{script_json(timeline.data)}</script></div>\n'
    )


def _resource(name: str) -> str:
    return (files("stagewright.report.page") / name).read_text(encoding="utf-8")
