from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from stagewright.report.page.charts.svg import bar_svg, clean, line_svg
from stagewright.report.page.sections import Bar, BarChart, BarPart, Line, LineChart


def _chart(**keys: object) -> BarChart:
    parts = (
        BarPart(name="compute", paint="share-compute", start=0.0, end=30.0),
        BarPart(name="wait", paint="share-wait", start=30.0, end=75.0),
    )
    bars = (Bar(label="worker 0", parts=parts, text="75/s", mark=100.0),)
    return BarChart(name="x", title="Times", quantity="number", bars=bars, mark_name="ideal", **keys)  # type: ignore[arg-type]


def test_bars_are_as_long_as_their_numbers() -> None:
    drawing = ElementTree.fromstring(bar_svg(_chart()))
    bars = [(one.get("x"), one.get("width"), one.get("fill")) for one in drawing.iter("rect")]
    assert bars == [("0%", "30%", "var(--share-compute)"), ("30%", "45%", "var(--share-wait)")]
    marks = [one for one in drawing.iter("line") if one.get("class") == "mark"]
    assert [one.get("x1") for one in marks] == ["100%"]
    texts = [one.text for one in drawing.iter("text")]
    assert texts == ["0", "25", "50", "75", "100", "worker 0", "75/s"]


def test_a_legend_is_there_where_it_says_something() -> None:
    assert _chart().legend == (("compute", "share-compute"), ("wait", "share-wait"))
    alone = BarPart(name="", paint="stage-0", start=0.0, end=1.0)
    bars = (Bar(label="a", parts=(alone,)), Bar(label="b", parts=(alone,)))
    assert BarChart(name="x", title="", quantity="number", bars=bars).legend == ()


def test_a_curve_goes_from_corner_to_corner() -> None:
    line = Line(name="loss", paint="stage-0", x=(0.0, 50.0, 100.0), y=(100.0, 50.0, 0.0))
    chart = LineChart(name="x", title="Loss", x_title="step", y_title="loss", lines=(line,))
    drawing = ElementTree.fromstring(line_svg(chart))
    assert next(drawing.iter("path")).get("d") == "M0 0L500 500L1000 1000"
    step = Line(name="memory", paint="stage-0", x=(0.0, 50.0, 100.0), y=(100.0, 50.0, 0.0), style="step")
    chart = LineChart(name="x", title="", x_title="", y_title="", lines=(step,))
    assert 'd="M0 0H500V500H1000V1000"' in line_svg(chart)


def test_numbers_that_are_none_are_left_out() -> None:
    line = Line(name="loss", paint="stage-0", x=(0.0, 1.0, 2.0), y=(1.0, float("nan"), float("inf")))
    drawing = line_svg(LineChart(name="x", title="", x_title="", y_title="", lines=(line,)))
    assert "nan" not in drawing
    assert "inf" not in drawing
    empty = Line(name="loss", paint="stage-0", x=(), y=())
    ElementTree.fromstring(line_svg(LineChart(name="x", title="", x_title="", y_title="", lines=(empty,), x_log=True)))


def test_long_curves_are_thinned_and_keep_their_end() -> None:
    count = 50_000
    line = Line(name="loss", paint="stage-0", x=tuple(map(float, range(count))), y=(1.0,) * count)
    drawing = line_svg(LineChart(name="x", title="", x_title="", y_title="", lines=(line,)))
    points = re.findall(r"[ML][\d. ]+", drawing)
    assert 1000 < len(points) < 2100
    assert points[-1].startswith("L1000 ")


@pytest.mark.parametrize(
    ("text", "shown"),
    [("<b>&\"'", "&lt;b&gt;&amp;&quot;&#x27;"), ("a\x00b\x1b", "a\ufffdb\ufffd"), ("\udcff", "?"), ("é×", "é×")],
)
def test_text_is_escaped(text: str, shown: str) -> None:
    assert clean(text) == shown
