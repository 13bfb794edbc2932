"""The live page as one file: the template with the palette's colors and the server's nonce."""

from __future__ import annotations

from stagewright.report.render.html import color_variables, render_template, template_text


def page_html(nonce: str, speed: float | None = None) -> str:
    """Render the page; its script and style carry the nonce.

    ``speed``: replay a finished run at once, at this speed.
    """
    return render_template(
        "live.html",
        nonce=nonce,
        speed="" if speed is None else f"{speed:g}",
        light=color_variables(),
        dark=color_variables(dark=True),
        style=template_text("live.css"),
        script=template_text("live.js"),
    )
