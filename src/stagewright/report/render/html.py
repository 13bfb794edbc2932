"""HTML from jinja2 templates: one environment that escapes every value.

Templates are files in ``report/templates``. Only `Markup` values stay unescaped: the package's own styles and scripts,
SVG drawings, and JSON written by `script_json`.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

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


_COMMAND = re.compile(
    r"stagewright(?: [a-z]+\b)+(?: --[a-z][a-z-]*(?: (?!-)[\w,.:+/]*\w)?)*"  # with its options
    r"|(?<![\w-])--[a-z][a-z-]*"  # an option alone
)
_UNIT = re.compile(r"(?<=\d) (?=(?:%|×|[KMGT]i?B|B|GB|ms|µs|s|[MG]b/s)(?![\w]))| (?=± )|(?<=±) ")
_NO_BREAK = "\u00a0"


def sentence_html(text: str) -> Markup:
    """Write a sentence: commands as code, and no line break between a number and its unit or inside of an option."""
    parts, end = [], 0
    for match in _COMMAND.finditer(text):
        words = [f'<span class="word">{escape(word)}</span>' for word in match[0].split(" ")]
        parts += [escape(_UNIT.sub(_NO_BREAK, text[end : match.start()])), Markup(f"<code>{' '.join(words)}</code>")]
        end = match.end()
    return Markup("").join([*parts, escape(_UNIT.sub(_NO_BREAK, clean_text(text[end:])))])


def breakable_html(text: str) -> Markup:
    """Write a column's name so that a line may break within: after dots and underscores of optimizer.learning_rate."""
    return Markup(re.sub(r"(?<=\w)([._])(?=\w)", r"\1<wbr>", str(escape(clean_text(text)))))


def color_variables(*, dark: bool = False) -> Markup:
    """Write the palette as CSS variables."""
    return Markup(" ".join(f"--{name}: {color(name, dark=dark)};" for name in color_names()))


def clean_text(text: str) -> str:
    """Replace characters that HTML files must not contain: control characters and lone surrogates."""
    plain = "".join(character if character >= " " or character in "\n\t" else "\ufffd" for character in text)
    return plain.encode("utf-8", "replace").decode("utf-8")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("stagewright.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markup) else clean_text(str(value)),
    )
    environment.filters |= {"sentence": sentence_html, "breakable": breakable_html}
    return environment
