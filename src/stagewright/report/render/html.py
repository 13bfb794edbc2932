"""HTML from jinja2 templates: one environment that escapes every value.

Templates are files in ``report/templates``. Only `Markup` values stay unescaped: the package's own styles and scripts,
SVG drawings, and JSON written by `script_json`.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from stagewright.report.palette import color, color_names


def render_template(name: str, /, **values: Any) -> str:
    """Render a template of ``report/templates``."""
    return _environment().get_template(name).render(values)


def render_macro(name: str, /, *values: Any) -> Markup:
    """Render a macro of ``items.html``."""
    macro = getattr(_environment().get_template("items.html").module, name)
    return Markup(macro(*values))


def template_text(name: str) -> Markup:
    """Read a style sheet or script of the package, to be placed in a page unchanged."""
    return Markup((files("stagewright.report") / "templates" / name).read_text(encoding="utf-8"))


def script_json(data: object) -> Markup:
    """Write JSON for a script element: ``<``, ``>`` and ``&`` become escapes, so that no value can end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def color_variables(*, dark: bool = False) -> Markup:
    """Write the palette as CSS variables."""
    return Markup(" ".join(f"--{name}: {color(name, dark=dark)};" for name in color_names()))


def clean_text(text: str) -> str:
    """Replace characters that HTML files must not contain: control characters and lone surrogates."""
    plain = "".join(character if character >= " " or character in "\n\t" else "\ufffd" for character in text)
    return plain.encode("utf-8", "replace").decode("utf-8")


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("stagewright.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markup) else clean_text(str(value)),
    )
