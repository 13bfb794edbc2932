"""The section that compares forecasts with measurements."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.quantity import format_bytes, format_s
from stagewright.report.page.content.runs import RunData
from stagewright.report.page.sections import Bar, BarChart, BarPart, Section
from stagewright.table import Table, number_columns, text_columns

_TITLE = "Forecast and measurement"


def forecast_section(runs: Sequence[RunData]) -> Section | None:
    """Show forecast and measured step and memory of each run; without forecasts, say how to add them."""
    timed = [run for run in runs if run.is_timed]
    if not timed:
        return None
    forecasts = [(run, run.forecast) for run in timed if run.forecast is not None]
    reasons = [f"{run.label}: {run.missing['forecast']}." for run in timed if "forecast" in run.missing]
    if not forecasts:
        names = " ".join(str(run.folder.path) for run in timed[:2]) + (" …" if len(timed) > 2 else "")
        hint = "These runs have no forecasts. To measure the model here and add them: "
        text = reasons[0] if reasons else f"{hint}stagewright report {names} --forecast"
        return Section(name="forecast", title=_TITLE, prose=(text,))
    bars, rows = [], []
    for run, forecast in forecasts:
        measured_s = run.result.latency_s
        sources = (("measured", run.paint, measured_s), ("forecast", "tone-ideal", forecast.step_s))
        for name, paint, seconds in sources:
            part = BarPart(name="", paint=paint, start=0.0, end=seconds, hint=format_s(seconds))
            bars.append(Bar(label=f"{run.label}, {name}", parts=(part,), text=format_s(seconds)))
        measured_bytes = run.result.max_memory_bytes
        forecast_bytes = max(worker.memory.counted_bytes for worker in forecast.workers)
        rows.append(
            (
                run.label,
                format_s(measured_s),
                format_s(forecast.step_s),
                _format_error(forecast.step_s, measured_s),
                format_bytes(measured_bytes),
                format_bytes(forecast_bytes),
                _format_error(forecast_bytes, measured_bytes),
            )
        )
    headings = ("measured step", "forecast", "error", "measured memory", "forecast", "error")
    table = Table(
        columns=(*text_columns("run"), *number_columns(*headings)),
        rows=tuple(rows),
        notes=(
            "Forecasts use the model's profile and the calibration of this machine; for runs of another machine the "
            "error includes the difference between the machines.",
        ),
    )
    chart = BarChart(
        name="forecast", title="Step time, measured and forecast", quantity="seconds", bars=tuple(bars), in_table=True
    )
    return Section(name="forecast", title=_TITLE, prose=tuple(reasons), items=(chart, table))


def _format_error(forecast: float, measured: float) -> str:
    """Format the relative error of a forecast."""
    if not measured:
        return "–"
    percent = round(100 * (forecast / measured - 1))
    return f"{percent:+d} %".replace("-", "−") if percent else "0 %"
