"""The live page as one text: ``page.html`` with the palette's colours and the server's nonce put in."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from stagewright.report.palette import color, color_names

__all__ = ["page_html"]


def page_html(nonce: str, speed: float | None = None) -> str:
    """The page; its script and style carry the nonce. With a speed, a run that has ended is replayed at once."""
    return _template().replace("{{nonce}}", nonce).replace("{{speed}}", "" if speed is None else f"{speed:g}")


@cache
def _template() -> str:
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return text.replace("/*{{light}}*/", _variables(dark=False)).replace("/*{{dark}}*/", _variables(dark=True))


def _variables(*, dark: bool) -> str:
    return " ".join(f"--{name}: {color(name, dark=dark)};" for name in color_names())
