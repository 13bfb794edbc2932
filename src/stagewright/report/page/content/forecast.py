"""Forecasts of runs that have none, and the section that compares forecasts with measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from stagewright.errors import StagewrightError
from stagewright.quantity import format_bytes, format_s
from stagewright.report.page.content.runs import RunData
from stagewright.report.page.sections import BarChart, Section, plain_bar
from stagewright.table import Table, number_columns, text_columns

if TYPE_CHECKING:
    from stagewright.planner.forecast import PreparedPlan
    from stagewright.spec.plan import Plan

_TITLE = "Forecast and measurement"


def make_forecaster(prepare: Callable[[Plan], PreparedPlan]) -> Callable[[RunData], RunData]:
    """Return a function that measures a run's model here, and adds forecast and explanation or why it has none."""
    from stagewright.planner.explain import explain_run

    def add_forecast(run: RunData) -> RunData:
        try:
            prepared = prepare(run.plan)
            explanation = explain_run(prepared, run.folder) if run.plan.mesh.num_workers > 1 else None
            return replace(run, forecast=prepared.forecast(), explanation=explanation)
        except StagewrightError as error:
            return replace(run, missing={**run.missing, "forecast": f"it can't be forecast: {error}"})

    return add_forecast


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
            text = format_s(seconds)
            bars.append(plain_bar(f"{run.label}, {name}", paint, seconds, text, hint=text))
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
