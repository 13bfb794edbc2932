"""The study *stages* in four sentences. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stagewright.cluster.device import num_separate
from stagewright.simulator.what_if import explain_loss
from stagewright.studies.framework.phrases import counted, joined, percent, spread, times
from stagewright.studies.framework.study import Results, Summary
from stagewright.studies.parts.measurements import why_rough
from stagewright.studies.stages.contrast import Contrast, contrast_summary
from stagewright.studies.stages.measured import (
    MeasuredRun,
    Runs,
    bound_speedup,
    equal_sizes,
    forecast_check,
    forecast_speedup,
    forecasts_of,
    known_change,
)


def summarize(results: Results, options: Mapping[str, Any], runs: Runs, contrast: Contrast | None = None) -> Summary:
    best = {
        mode: run
        for mode in options["modes"]
        if (run := _best([run for run in runs[mode] if run.speedup is not None and not run.shared])) is not None
    }
    devices = counted(num_separate(options["devices"]), "device")
    is_shared = any(run.shared for mode in options["modes"] for run in runs[mode])
    if not best:
        return Summary(
            measured=f"No pipeline was measured on {devices} with a device for each stage.",
            ideal="With n stages on n devices at most n ×.",
            why="Stages that share devices show that a split works, not a speed-up."
            if is_shared
            else "Unknown: nothing was measured.",
            advice="Run as many stages as there are devices: --stages 2."
            if is_shared
            else "See which parts failed, and run the same command again.",
        )
    speedups = joined(_measured(mode, run) for mode, run in best.items())
    unknown = [mode for mode in options["modes"] if mode not in best and runs[mode]]
    disturbed = f" Inconclusive for {joined(unknown)}, whose runs were disturbed." if unknown else ""
    policies, advice = contrast_summary(contrast)
    return Summary(
        measured=f"{options['model']}: {speedups} over one device.{_more_stages(results, options, runs)}{disturbed}"
        f"{policies}",
        ideal=_ideal(results, options, best),
        why=f"{_why(results, best)}{_traces(results, best)}",
        advice=" ".join(filter(None, (_advice(results, options, best, runs), equal_sizes(results, options)))) + advice,
    )


def _best(runs: Sequence[MeasuredRun]) -> MeasuredRun | None:
    """The fastest of the runs with the most stages."""
    return max(runs, key=lambda run: (run.num_stages, run.speedup or 0.0), default=None)


def _measured(mode: str, run: MeasuredRun) -> str:
    rounds = f" ({spread(run.speedups)})" if len(run.speedups) > 1 else ""
    return f"{mode} with {run.num_stages} stages {times(run.speedup or 0.0)}{rounds}"


def _more_stages(results: Results, options: Mapping[str, Any], runs: Runs) -> str:
    """Say what is known of numbers of stages for which there are too few devices."""
    texts, withheld = [], []
    for mode in options["modes"]:
        measured = {run.num_stages for run in runs[mode]}
        check = forecast_check(results, options, mode, runs[mode])
        forecasts = {
            count: max(check.corrected(forecast_speedup(results, options, mode, one)) or 0.0 for _, one in found)
            for count in options["stages"]
            if count not in measured and (found := forecasts_of(results, mode, count))
        }
        if any(forecasts.values()):
            speedups = joined(f"{count} stages {times(speedup)}" for count, speedup in forecasts.items())
            kind = "unverified forecast" if check.verdict == "unchecked" else "forecast"
            texts.append(f" {mode.capitalize()}, {kind} for more devices: {speedups}.")
        elif forecasts:
            withheld.append((mode, joined(map(str, forecasts))))
    for counts in dict.fromkeys(counts for _, counts in withheld):
        modes = joined(mode for mode, others in withheld if others == counts)
        texts.append(f" {modes.capitalize()}: forecasts for {counts} stages, which need more devices, are withheld.")
    return "".join(texts)


def _traces(results: Results, best: Mapping[str, MeasuredRun]) -> str:
    """What the trace of a pipeline shows that the baseline's does not."""
    texts = []
    for mode in best:
        shares = (results.get(f"why-{mode}") or {}).get("shares") or []
        sends = [share["transfer_s"] / share["step_s"] for share in shares]
        idle = [share["bubble_s"] / share["step_s"] for share in shares]
        if shares:
            texts.append(
                f"in {mode} up to {percent(max(sends))} of a worker's step for sends and receives and up to "
                f"{percent(max(idle))} in the pipeline bubble"
            )
    return f" What only the pipeline's trace shows: {joined(texts)}." if texts else ""


def _ideal(results: Results, options: Mapping[str, Any], best: Mapping[str, MeasuredRun]) -> str:
    most = max(run.num_stages for run in best.values())
    bounds = []
    for mode, run in best.items():
        saved = results.get(f"profile-{mode}")
        bound = (
            None
            if saved is None
            else bound_speedup(results, options, mode, saved["splits"][str(run.num_stages)][run.policy])
        )
        if bound is not None:
            bounds.append(f"{mode} {times(min(bound, run.num_stages))}")
    limits = f"; with this split's balance and pipeline bubble, links free, at most {joined(bounds)}" if bounds else ""
    return f"{most} × on {most} devices{limits}."


def _why(results: Results, best: Mapping[str, MeasuredRun]) -> str:
    texts = []
    for mode in best:
        why = results.get(f"why-{mode}")
        known = [] if why is None else [part for part in why["parts"] if part["name"] != "unexplained"]
        parts = [part for part in known if part["seconds"] > 0]
        if why is not None and parts:
            largest = max(parts, key=lambda part: part["seconds"])
            share = percent(largest["seconds"] / why["step_s"])
            text = f"{mode}: {largest['name']} takes {share} of a step ({explain_loss(largest['name'])})"
            rest = sum(part["seconds"] for part in why["parts"] if part["name"] == "unexplained")
            if rest > largest["seconds"]:
                text += f", but more, {percent(rest / why['step_s'])}, is unexplained: the machine was disturbed"
            texts.append(text)
    if not texts:
        return "Unknown: no pipeline was explained."
    because = why_rough(results)
    busy = f"Uncertain, since {because}. In this run: " if because else ""
    return f"{busy}{'t' if busy else 'T'}he largest loss in {'; in '.join(texts)}."


def _advice(results: Results, options: Mapping[str, Any], best: Mapping[str, MeasuredRun], runs: Runs) -> str:
    """Which policy to use, and what else would help; modes with the same advice share a sentence."""
    modes_of: dict[str, list[str]] = {}
    for mode, run in best.items():
        others = [other for other in runs[mode] if other.num_stages == run.num_stages and other is not run]
        slower = [other.policies for other in others if run.differs_from(other)]
        text = (
            f"cut by {run.policies}, faster than {joined(slower)}."
            if slower
            else "any of these policies will do, their differences are within the noise."
            if others
            else f"any policy will do, {joined(run.policies.split(', '))} cut alike."
            if run.also
            else f"cut by {run.policies}."
        )
        change, open_reason = known_change(results, options, mode, runs[mode])
        if open_reason:
            text += " What else would make it faster is inconclusive."
        if change:
            text += f" Then {change['what']} gains {percent(change['gain'])} more, by forecast."
        modes_of.setdefault(text, []).append(mode)
    return " ".join(f"{joined(modes).capitalize()}: {text}" for text, modes in modes_of.items())
