"""What was forecast beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.quantity import format_bytes, format_s
from stagewright.report.page.content.runs import RunData
from stagewright.report.page.sections import Bar, BarChart, BarPart, Section, Table

__all__ = ["forecast_section"]


def forecast_section(runs: Sequence[RunData]) -> Section | None:
    """A pair of bars and a row for each run; without forecasts a sentence how to get them."""
    timed = [run for run in runs if run.is_timed]
    if not timed:
        return None
    known = [(run, run.forecast) for run in timed if run.forecast is not None]
    if not known:
        names = " ".join(str(run.folder.path) for run in timed[:2]) + (" …" if len(timed) > 2 else "")
        how = f"stagewright report {names} --forecast"
        why = [reason for run in timed if (reason := run.missing.get("forecast"))]
        text = (
            why[0] if why else f"These runs are shown without forecasts; to measure the model here and add them: {how}"
        )
        return Section(name="forecast", title="Forecast and measured", prose=(text,))
    bars, rows = [], []
    for run, forecast in known:
        measured = float(run.result["latency_s"])
        pairs = (("measured", run.paint, measured), ("forecast", "tone-ideal", forecast.step_s))
        for name, paint, seconds in pairs:
            part = BarPart(name="", paint=paint, start=0.0, end=seconds, hint=format_s(seconds))
            bars.append(Bar(label=f"{run.label}, {name}", parts=(part,), text=format_s(seconds)))
        peak = max(run.result["peak_memory_bytes"])
        counted = max(worker.memory.counted_bytes for worker in forecast.workers)
        rows.append(
            (
                run.label,
                format_s(measured),
                format_s(forecast.step_s),
                _off(forecast.step_s, measured),
                format_bytes(peak),
                format_bytes(counted),
                _off(counted, peak),
            )
        )
    head = ("run", "step measured", "forecast", "off by", "memory measured", "forecast", "off by")
    table = Table(
        head=head,
        rows=tuple(rows),
        right=frozenset(range(1, 7)),
        note="Forecast from the model's profile and this machine's calibration, both made here; a run of another "
        "machine would be off for that alone.",
    )
    chart = BarChart(
        name="forecast", title="Step, measured and forecast", quantity="seconds", bars=tuple(bars), in_table=True
    )
    missing = tuple(f"{run.label}: {run.missing['forecast']}." for run in timed if "forecast" in run.missing)
    return Section(name="forecast", title="Forecast and measured", prose=missing, items=(chart, table))


def _off(forecast: float, measured: float) -> str:
    """How much more was forecast."""
    if not measured:
        return "–"
    percent = round(100 * (forecast / measured - 1))
    return f"{percent:+d} %".replace("-", "−") if percent else "0 %"
