"""The report page as one HTML file: styles, script, charts and data inline, no request to anywhere.

The templates escape every text. A content security policy allows the page's own script, by its hash, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator

from markupsafe import Markup

from stagewright.report.page.charts.svg import bar_svg, line_svg
from stagewright.report.page.sections import (
    BarChart,
    Card,
    Code,
    Fold,
    Item,
    LineChart,
    Page,
    Picture,
    Prose,
    Section,
    Timeline,
)
from stagewright.report.palette import color, color_names
from stagewright.report.render.html import render_macro, render_template, script_json, template_text
from stagewright.table import Table


def page_html(page: Page) -> str:
    """Render the whole file."""
    script = template_text("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    colors = (f"--{name}: light-dark({color(name)}, {color(name, dark=True)});" for name in color_names())
    return render_template(
        "report.html",
        page=page,
        sections=[_render_section(section) for section in page.sections],
        policy=Markup(policy),
        colors=Markup(" ".join(colors)),
        style=template_text("report.css"),
        script=script,
    )


def _render_section(section: Section) -> Markup:
    num_timelines = sum(isinstance(item, Timeline) for item in _flat(section.items))
    return render_macro("section", section, [_render_item(item) for item in section.items], num_timelines)


def _flat(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items with those inside folds."""
    for item in items:
        yield from _flat(item.items) if isinstance(item, Fold) else (item,)


def _render_item(item: Item) -> Markup:
    match item:
        case Table():
            return render_macro("table", item)
        case BarChart():
            keys = [(name, paint, "") for name, paint in item.legend]
            return render_macro("chart", item, "", Markup(bar_svg(item)), keys, item.mark_name)
        case LineChart():
            keys = [(line.name, line.paint, "dashed" if line.dashed else "") for line in item.lines]
            axes = f"{item.y_title} over {item.x_title}"
            return render_macro("chart", item, axes, Markup(line_svg(item)), keys if len(keys) > 1 else [], "")
        case Timeline():
            return render_macro("timeline", item, script_json(item.data))
        case Code():
            return render_macro("code", item)
        case Prose():
            return render_macro("prose", item)
        case Card():
            return render_macro("card", item)
        case Picture():
            return render_macro("picture", item, base64.b64encode(item.content).decode("ascii"))
        case Fold():
            return render_macro("fold", item.title, [_render_item(inner) for inner in item.items])
