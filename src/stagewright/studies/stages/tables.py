"""Tables and figures of the study *stages*."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stagewright.quantity import format_bytes, format_s
from stagewright.studies.framework.phrases import percent
from stagewright.studies.framework.study import Figure, Results
from stagewright.studies.framework.tables import study_table
from stagewright.studies.parts.measurements import calibration_note
from stagewright.studies.stages.contrast import Contrast, contrast_table
from stagewright.studies.stages.measured import (
    PUBLISHED,
    Runs,
    baseline_rate,
    bound_speedup,
    forecast_check,
    forecast_speedup,
    forecasts_of,
    groups_of,
    repeated_baselines,
)
from stagewright.table import Table


def tables(
    results: Results, options: Mapping[str, Any], runs: Runs, contrast: Contrast | None = None
) -> tuple[Table, ...]:
    """Cuts, speed-ups, the policies on the second model, and what lies between the speed-ups and n."""
    explained = [_loss_table(results[f"why-{mode}"], mode) for mode in options["modes"] if f"why-{mode}" in results]
    policies = [contrast_table(contrast)] if contrast is not None and contrast.runs else []
    return (_cut_table(results, options), _speedup_table(results, options, runs), *policies, *explained)


def figures(results: Results, options: Mapping[str, Any], runs: Runs) -> tuple[Figure, ...]:
    """Speed-up by number of stages, and the waterfall of each mode's best run."""
    has_forecasts = any(
        check.corrected(forecast_speedup(results, options, mode, forecast)) is not None
        for mode in options["modes"]
        for check in (forecast_check(results, options, mode, runs[mode]),)
        for count in options["stages"]
        if not any(run.num_stages == count for run in runs[mode])
        for _, forecast in forecasts_of(results, mode, count)
    )
    rings = "; rings are forecasts" if has_forecasts else ""
    speedups = Figure(
        name="speedups",
        caption=f"Speed-up over one device by number of stages and policy{rings}.",
        draw=partial(_draw_speedups, results, options, runs),
    )
    waterfalls = [
        Figure(
            name=f"why-{mode}",
            caption=f"{mode}: from the ideal step (baseline ÷ n) to the measured step.",
            draw=partial(_draw_waterfall, results[f"why-{mode}"], f"{options['model']}, {mode}"),
        )
        for mode in options["modes"]
        if f"why-{mode}" in results
    ]
    return (speedups, *waterfalls)


def _cut_table(results: Results, options: Mapping[str, Any]) -> Table:
    rows = [
        (
            mode,
            str(count),
            names,
            ", ".join(split["cut_names"]),
            format_s(split["bottleneck_s"]),
            f"{split['balance']:.2f}",
            format_bytes(split["sends_bytes"]),
            "beaten" if (bound := bound_speedup(results, options, mode, split)) is None else f"{bound:.2f}",
        )
        for mode in options["modes"]
        if (saved := results.get(f"profile-{mode}")) is not None
        for count in options["stages"]
        for names, split in groups_of(saved["splits"][str(count)])
    ]
    return study_table(
        "Cuts of each policy",
        ("mode", "stages", "policy", "cut after", "bottleneck stage", "balance", "sent", "upper bound"),
        rows,
        "For one micro-batch, from profiled units. Balance: mean time of the stages ÷ time of the bottleneck stage. "
        "Upper bound: the speed-up with free links over one device with the same micro-batches; in inference for an "
        "endless stream of batches, in training for one step with its pipeline bubble. Beaten: a run was faster, since "
        "its baseline runs the whole batch at once, or since the machine was slower while it was profiled.",
    )


def _speedup_table(results: Results, options: Mapping[str, Any], runs: Runs) -> Table:
    rows = []
    sentences = [text for mode in options["modes"] if (text := repeated_baselines(runs[mode]))]
    for mode in options["modes"]:
        baseline = baseline_rate(results, options, mode)
        check = forecast_check(results, options, mode, runs[mode])
        if any(not any(run.num_stages == count for run in runs[mode]) for count in options["stages"]):
            sentences.append(f"{mode.capitalize()}: {check.sentence}")
        if baseline is not None:
            rows.append((mode, "1", "serial", f"{baseline:.1f}", "1.00", "", "measured", "–", "–"))
        for count in options["stages"]:
            published = str(PUBLISHED[count]) if mode == "inference" and count in PUBLISHED else "–"
            measured = [run for run in runs[mode] if run.num_stages == count]
            forecasts = (results.get(f"forecast-{mode}") or {}).get(str(count), {})
            rows += [
                (
                    mode,
                    str(count),
                    run.policies,
                    f"{run.samples_per_s:.1f}",
                    f"{run.speedup:.2f}" if run.speedup is not None else "–",
                    run.range,
                    "measured, devices shared" if run.shared else "measured",
                    f"{forecast_speedup(results, options, mode, forecasts[run.policy]):.2f}"
                    if "speedup" in forecasts.get(run.policy, {})
                    else "–",
                    published,
                )
                for run in measured
            ]
            for names, forecast in [] if measured else forecasts_of(results, mode, count):
                plain = forecast_speedup(results, options, mode, forecast)
                corrected = check.corrected(plain)
                source = {"trusted": "forecast", "unchecked": "unverified forecast"}.get(
                    check.verdict, f"forecast, {check.verdict}"
                )
                speedup = "–" if corrected is None else f"{corrected:.2f}"
                rate = "–" if corrected is None else f"{forecast['samples_per_s'] * corrected / plain:.1f}"
                shown = "–" if corrected is None else f"{plain:.2f}"
                rows.append((mode, str(count), names, rate, speedup, "", source, shown, published))
    machine = (
        "the given cluster"
        if options["cluster"]
        else "as many devices as stages, with the links and the contention measured between two devices here, relative "
        "to the same baseline"
    )
    return study_table(
        "Speed-up over one device",
        ("mode", "stages", "policy", "samples/s", "speed-up", "range", "source", "forecast", "published"),
        rows,
        "Speed-up: median over rounds of the ratio to the single-device baseline (serial) of the same round; every "
        "measured row first passed its parity check. Rows whose source is forecast were not run, for lack of devices: "
        f"they assume {machine}. {' '.join(sentences)}{calibration_note(results)} Published: another model, 4 "
        "machines, inference.",
    )


def _loss_table(why: Mapping[str, Any], mode: str) -> Table:
    rows = [("baseline ÷ n", format_s(why["ideal_s"]), percent(why["ideal_s"] / why["step_s"]), "")]
    rows += [
        (
            part["name"],
            format_s(part["seconds"]).replace("-", "−"),
            percent(part["seconds"] / why["step_s"]),
            f"{part['lost_speedup']:.2f}".replace("-", "−"),
        )
        for part in why["parts"]
        if part["seconds"]
    ]
    rows.append(("step", format_s(why["step_s"]), "100 %", ""))
    return study_table(
        f"Why {why['stages']} stages reach {why['speedup']:.2f} × and not {why['num_devices']} ×: {mode}",
        ("part", "time", "of the step", "speed-up lost"),
        rows,
        f"{why['stages']} stages, cut by {why['policy']}, with the measured times of its stages. Unexplained: the "
        "difference between the measured and the forecast step; negative if the run was faster than forecast.",
    )


def _draw_speedups(results: Results, options: Mapping[str, Any], runs: Runs, path: Path) -> None:
    from stagewright.report.figures.stages import SpeedupPoint, draw_speedups

    panels: dict[str, list[SpeedupPoint]] = {}
    for mode in options["modes"]:
        points = panels.setdefault(mode, [])
        for count in options["stages"]:
            measured = [run for run in runs[mode] if run.num_stages == count]
            for run in measured:
                if run.speedup is not None:
                    about: dict[str, Any] = {"num_stages": count, "speedup": run.speedup, "is_measured": True}
                    about |= {"low": min(run.speedups), "high": max(run.speedups)}
                    points += [SpeedupPoint(policy=policy, **about) for policy in (run.policy, *run.also)]
            check = forecast_check(results, options, mode, runs[mode])
            for names, forecast in [] if measured else forecasts_of(results, mode, count):
                speedup = check.corrected(forecast_speedup(results, options, mode, forecast))
                if speedup is None:
                    continue
                about = {"num_stages": count, "speedup": speedup, "is_measured": False}
                about |= {"low": speedup, "high": speedup}
                points += [SpeedupPoint(policy=policy, **about) for policy in names.split(", ")]
        order = {policy: index for index, policy in enumerate(options["policies"])}
        points.sort(key=lambda point: order[point.policy])
    draw_speedups(panels, PUBLISHED, path, title=f"{options['model']}: speed-up over one device")


def _draw_waterfall(why: Mapping[str, Any], title: str, path: Path) -> None:
    from stagewright.report.figures.waterfall import draw_waterfall
    from stagewright.simulator.what_if import SpeedupBreakdown, SpeedupLoss

    breakdown = SpeedupBreakdown(
        num_devices=why["num_devices"],
        serial_s=why["serial_s"],
        step_s=why["step_s"],
        parts=tuple(SpeedupLoss(name=part["name"], seconds=part["seconds"]) for part in why["parts"]),
    )
    draw_waterfall(breakdown, path, title=title, caption=f"{why['stages']} stages, cut by {why['policy']}")
