"""The tables and figures of the study *stages*. Pure but for the drawing itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stagewright.quantity import format_bytes, format_s
from stagewright.studies.framework.phrases import percent, spread
from stagewright.studies.framework.study import Drawing, Results, Table
from stagewright.studies.stages.measured import (
    PUBLISHED,
    MeasuredRun,
    forecast_speedup,
    forecasts_of,
    groups_of,
    serial_rate,
)

__all__ = ["drawings", "tables"]

Runs = Mapping[str, Sequence[MeasuredRun]]


def tables(results: Results, options: Mapping[str, Any], runs: Runs) -> tuple[Table, ...]:
    """Cuts, speed-ups, and what lies between these and n."""
    found = [_cut_table(results, options), _speedup_table(results, options, runs)]
    found += [_why_table(results[f"why-{mode}"], mode) for mode in options["modes"] if f"why-{mode}" in results]
    return tuple(found)


def drawings(results: Results, options: Mapping[str, Any], runs: Runs) -> tuple[Drawing, ...]:
    """Speed-ups over stages, and the waterfall of each mode's best run."""
    found = [
        Drawing(
            name="speedups",
            caption="Speed-up over serial by number of stages and policy; rings are forecast.",
            draw=partial(_draw_speedups, results, options, runs),
        )
    ]
    found += [
        Drawing(
            name=f"why-{mode}",
            caption=f"{mode}: what lies between serial ÷ n and the measured step.",
            draw=partial(_draw_why, results[f"why-{mode}"], f"{options['model']}, {mode}"),
        )
        for mode in options["modes"]
        if f"why-{mode}" in results
    ]
    return tuple(found)


def _cut_table(results: Results, options: Mapping[str, Any]) -> Table:
    rows = []
    for mode in options["modes"]:
        saved = results.get(f"profile-{mode}")
        if saved is None:
            continue
        for count in options["stages"]:
            for names, split in groups_of(saved["splits"][str(count)]):
                rows.append(
                    (
                        mode,
                        str(count),
                        names,
                        ", ".join(split["cut_names"]),
                        format_s(split["bottleneck_s"]),
                        f"{split['balance']:.2f}",
                        format_bytes(split["sends_bytes"]),
                        f"{split['speedup_bound']:.2f}",
                    )
                )
    return Table(
        title="Where each policy cuts",
        columns=("mode", "stages", "policy", "cut after", "slowest stage", "balance", "sends", "at best ×"),
        rows=tuple(rows),
        note="Of one micro-batch, from measured units. Balance: mean of the stages ÷ the slowest. At best: with free "
        "links; for inference of an endless stream, for training of one step with its fill and drain.",
    )


def _speedup_table(results: Results, options: Mapping[str, Any], runs: Runs) -> Table:
    rows = []
    for mode in options["modes"]:
        serial = serial_rate(results, options, mode)
        if serial is not None:
            rows.append((mode, "1", "serial", f"{serial:.1f}", "1.00", "", "measured", "–", "–"))
        for count in options["stages"]:
            shown = str(PUBLISHED[count]) if mode == "inference" and count in PUBLISHED else "–"
            mine = [one for one in runs[mode] if one.num_stages == count]
            for one in mine:
                how = "measured, devices shared" if one.shared else "measured"
                rows.append(
                    (
                        mode,
                        str(count),
                        one.policies,
                        f"{one.samples_per_s:.1f}",
                        f"{one.speedup:.2f}" if one.speedup is not None else "–",
                        spread(one.speedups) if one.speedup is not None else "not equal to serial",
                        how,
                        _forecast_text(results, options, mode, count, one.policy),
                        shown,
                    )
                )
            if not mine:
                for names, forecast in forecasts_of(results, mode, count):
                    speedup = f"{forecast_speedup(results, options, mode, forecast):.2f}"
                    rows.append(
                        (
                            mode,
                            str(count),
                            names,
                            f"{forecast['samples_per_s']:.1f}",
                            speedup,
                            "",
                            "forecast",
                            speedup,
                            shown,
                        )
                    )
    return Table(
        title="Speed-up over serial",
        columns=("mode", "stages", "policy", "samples/s", "speed-up", "range", "how", "forecast", "published"),
        rows=tuple(rows),
        note="Speed-up: median over rounds of the ratio to serial of the same round; every measured row was first "
        "proven equal to serial. Rows that say forecast were not run, for lack of devices: they are of "
        + (
            "the given cluster"
            if options["cluster"]
            else "as many devices like these, which slow each other down as two of them do here, with such links; over "
            "the same serial"
        )
        + ". Published: another model, 4 machines, inference.",
    )


def _forecast_text(results: Results, options: Mapping[str, Any], mode: str, count: int, policy: str) -> str:
    found = (results.get(f"forecast-{mode}") or {}).get(str(count), {}).get(policy, {})
    return f"{forecast_speedup(results, options, mode, found):.2f}" if "speedup" in found else "–"


def _why_table(why: Mapping[str, Any], mode: str) -> Table:
    rows = [("serial ÷ n", format_s(why["ideal_s"]), percent(why["ideal_s"] / why["step_s"]), "")]
    rows += [
        (
            part["name"],
            format_s(part["seconds"]).replace("-", "−"),
            percent(part["seconds"] / why["step_s"]),
            f"{part['lost_speedup']:.2f}".replace("-", "−"),
        )
        for part in why["parts"]
    ]
    rows.append(("step", format_s(why["step_s"]), "100 %", ""))
    return Table(
        title=f"Why {why['stages']} stages give {why['speedup']:.2f} and not {why['num_devices']}: {mode}",
        columns=("part", "time", "of the step", "speed-up lost"),
        rows=tuple(rows),
        note=f"The run {why['run']}, cut by {why['policy']}, with its stages' own times. What was measured but not "
        "forecast is unexplained; below zero: it was faster than forecast.",
    )


def _draw_speedups(results: Results, options: Mapping[str, Any], runs: Runs, path: Path) -> None:
    from stagewright.report.figures.stages import SpeedupPoint, draw_speedups

    panels: dict[str, list[SpeedupPoint]] = {}
    for mode in options["modes"]:
        points = panels.setdefault(mode, [])
        for count in options["stages"]:
            mine = [one for one in runs[mode] if one.num_stages == count]
            for one in mine:
                if one.speedup is not None:
                    about: dict[str, Any] = {"num_stages": count, "speedup": one.speedup, "is_measured": True}
                    about |= {"low": min(one.speedups), "high": max(one.speedups)}
                    points += [SpeedupPoint(policy=policy, **about) for policy in (one.policy, *one.also)]
            for names, forecast in [] if mine else forecasts_of(results, mode, count):
                at = forecast_speedup(results, options, mode, forecast)
                about = {"num_stages": count, "speedup": at, "low": at, "high": at, "is_measured": False}
                points += [SpeedupPoint(policy=policy, **about) for policy in names.split(", ")]
        order = {policy: place for place, policy in enumerate(options["policies"])}
        points.sort(key=lambda point: order[point.policy])
    draw_speedups(panels, PUBLISHED, path, title=f"{options['model']}: speed-up over serial")


def _draw_why(why: Mapping[str, Any], title: str, path: Path) -> None:
    from stagewright.report.figures.waterfall import draw_waterfall
    from stagewright.simulator.what_if import Part, Parts

    parts = Parts(
        num_devices=why["num_devices"],
        serial_s=why["serial_s"],
        step_s=why["step_s"],
        parts=tuple(Part(name=part["name"], seconds=part["seconds"]) for part in why["parts"]),
    )
    draw_waterfall(parts, path, title=title, caption=f"{why['stages']} stages, cut by {why['policy']}")
