from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.colors import to_hex

from made_runs import make_run
from stagewright.report.page.charts.figures import chart_figure
from stagewright.report.page.content.timeline import make_timeline
from stagewright.report.page.sections import Bar, BarChart, BarPart, Line, LineChart
from stagewright.report.palette import color
from stagewright.trace.read import read_trace


def test_a_bar_is_what_the_page_draws() -> None:
    part = BarPart(name="", paint="strategy-data", start=0.5, end=2.0)
    chart = BarChart(name="x", title="$x$", quantity="times", bars=(Bar(label="$a", parts=(part,), text="2 ×"),))
    (axes,) = chart_figure(chart).axes
    (bar,) = axes.patches
    assert (bar.get_x(), bar.get_width(), to_hex(bar.get_facecolor()).upper()) == (0.5, 1.5, color("strategy-data"))  # type: ignore[attr-defined]
    assert axes.get_title(loc="left") == r"\$x\$", "not mathematics"


def test_curves_keep_their_points() -> None:
    line = Line(name="loss", paint="stage-1", x=(1.0, 10.0), y=(2.0, 1.0), dashed=True)
    chart = LineChart(name="x", title="", x_title="step", y_title="loss", lines=(line,), x_log=True)
    (axes,) = chart_figure(chart).axes
    (drawn,) = axes.lines
    assert list(drawn.get_xdata()) == [1.0, 10.0]
    assert list(drawn.get_ydata()) == [2.0, 1.0]
    assert axes.get_xscale() == "log"


def test_a_timeline_shows_the_median_step(tmp_path: Path) -> None:
    trace = read_trace(make_run(tmp_path, "pipeline=2"))
    figure = chart_figure(make_timeline(trace, name="x", title="pipeline=2"))
    (axes,), (legend,) = figure.axes, figure.legends
    kinds = {event.kind for worker in trace.workers for event in worker.events}
    names = [text.get_text() for text in legend.texts]
    assert names[:2] == ["forward and P2P send, in the color of the stage", "backward, paler"]
    assert ("optimizer" in names) == ("optimizer" in kinds)
    assert ("waiting for a P2P receive" in names) == ("receive" in kinds)
    begin, end = trace.spans[trace.median_step]
    assert axes.get_xlim()[1] == pytest.approx(end - begin)
    starts = sorted(bar.get_x() for bar in axes.patches if bar.get_x() >= 0 and bar.get_width() > 0.015)  # type: ignore[attr-defined]
    backward = [one.start_s - begin for worker in trace.workers for one in worker.of_step(1) if one.kind == "backward"]
    assert all(any(abs(one - start) < 1e-5 for start in starts) for one in backward)
