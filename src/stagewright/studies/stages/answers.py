"""Answers of the study *stages*, in sentences with their numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stagewright.cluster.device import num_separate
from stagewright.quantity import format_bytes, format_s
from stagewright.simulator.what_if import explain_loss
from stagewright.studies.framework.forecasts import ForecastCheck
from stagewright.studies.framework.phrases import counted, joined, percent, spread, times
from stagewright.studies.framework.study import Answer, Results, answer_all
from stagewright.studies.parts.shares import shares_text
from stagewright.studies.stages.contrast import Contrast
from stagewright.studies.stages.measured import (
    PUBLISHED,
    MeasuredRun,
    Runs,
    equal_sizes,
    forecast_check,
    forecast_speedup,
    forecasts_of,
    groups_of,
    known_change,
)
from stagewright.studies.stages.policies import best_policies

QUESTIONS = (
    "Where does each policy cut the model?",
    "What speed-up does each number of stages reach over one device?",
    "Which policy is best, and why?",
    "Why is the speed-up below the number of stages?",
    "What does the pipeline's trace show that the baseline's does not?",
    "How can it be improved?",
)
EVIDENCE: Mapping[str, tuple[str, ...]] = {
    QUESTIONS[0]: ("Cuts of each policy",),
    QUESTIONS[1]: ("Speed-up over one device",),
    QUESTIONS[2]: ("Policies on ",),
    QUESTIONS[3]: ("Why ", "why-"),
}
"""Beginnings of the titles and names of the tables and figures behind each answer."""


def answers(
    results: Results, options: Mapping[str, Any], runs: Runs, contrast: Contrast | None = None
) -> tuple[Answer, ...]:
    replies = (
        _cuts(results, options),
        _speedups(results, options, runs),
        best_policies(results, options, runs, contrast),
        _losses(results, options, runs),
        _traces(results, options, runs),
        _improvements(results, options, runs),
    )
    return answer_all(QUESTIONS, replies)


def _cuts(results: Results, options: Mapping[str, Any]) -> Iterator[str]:
    for mode in options["modes"]:
        saved = results.get(f"profile-{mode}")
        if saved is None:
            yield f"{mode.capitalize()}: unknown, since the model was not profiled."
            continue
        alike: dict[tuple[str, ...], dict[int, list[Mapping[str, Any]]]] = {}
        for count in options["stages"]:
            groups = groups_of(saved["splits"][str(count)])
            if groups:
                alike.setdefault(tuple(names for names, _ in groups), {})[count] = [split for _, split in groups]
            yield from (
                f"{mode.capitalize()}: {policy} can't split the model into {count} stages: {split['error']}."
                for policy, split in saved["splits"][str(count)].items()
                if "error" in split
            )
        for names, splits_of in alike.items():
            columns = zip(*splits_of.values(), strict=True)
            groups_text = "; ".join(_group_text(name, column) for name, column in zip(names, columns, strict=True))
            yield f"{mode.capitalize()}, {joined(map(str, splits_of))} stages: {groups_text}."
    equal = equal_sizes(results, options)
    if equal:
        yield f"Balance: the mean time of the stages ÷ that of the slowest, 1 is ideal. {equal}"


def _group_text(names: str, splits: Sequence[Mapping[str, Any]]) -> str:
    """Write where policies cut, for two stages, and how balanced the stages are."""
    verb = "cuts" if len(names.split(", ")) == 1 else "cut"
    where = f" after {splits[0]['cut_names'][0]}" if len(splits) == 1 and len(splits[0]["cut_names"]) == 1 else " alike"
    where = "" if verb == "cuts" and where == " alike" else f" {verb}{where}"
    balances = joined(f"{split['balance']:.2f}" for split in splits)
    return f"{joined(names.split(', '))}{where}, balance {balances}"


def _speedups(results: Results, options: Mapping[str, Any], runs: Runs) -> Iterator[str]:
    for mode in options["modes"]:
        check = forecast_check(results, options, mode, runs[mode])
        measured = {run.num_stages for run in runs[mode]}
        others = [count for count in options["stages"] if count not in measured]
        yield from (
            _speedup(results, options, mode, count, [run for run in runs[mode] if run.num_stages == count], check)
            for count in options["stages"]
            if count in measured
        )
        # Before the first forecast comes its error on the cases that were run.
        if any(forecasts_of(results, mode, count) for count in others):
            yield f"{mode.capitalize()}: {check.sentence}"
        yield from _not_run(results, options, mode, others, check)


def _speedup(
    results: Results,
    options: Mapping[str, Any],
    mode: str,
    count: int,
    runs: Sequence[MeasuredRun],
    check: ForecastCheck,
) -> str:
    """The measured speed-up with one number of stages, or why there is none."""
    head = f"{mode.capitalize()} with {count} stages"
    best = max((run for run in runs if run.speedup is not None), key=lambda run: run.speedup or 0.0, default=None)
    if best is not None and best.speedup is not None:
        rounds = f" ({spread(best.speedups)} over {len(best.speedups)} rounds)" if len(best.speedups) > 1 else ""
        if best.shared:
            devices = counted(num_separate(options["devices"]), "device")
            return (
                f"{head}: ran with its stages sharing {devices}, cut by {best.policies}, and passed its parity check. "
                f"That shows that the split computes the same and what it sends ({format_bytes(best.sent_bytes)} per "
                f"step), not a speed-up: {times(best.speedup)}{rounds} is of shared devices. "
                f"{_forecast_of(results, options, mode, count, check)}{_published(mode, (count,))}"
            )
        ideal = min(count, num_separate(options["devices"]))
        share = (
            f"which is {percent(best.speedup / ideal)} of the ideal {ideal} ×"
            if best.speedup <= ideal
            else f"more than the ideal {ideal} ×: a whole batch on one device is less efficient than micro-batches "
            "(caches), or was disturbed"
        )
        return (
            f"{head}: measured {times(best.speedup)}{rounds}, {share}, at {best.samples_per_s:.1f} samples/s, cut by "
            f"{best.policies}.{_published(mode, (count,))}"
        )
    left_out = [ratio for run in runs for ratio in run.implausible]
    if left_out:
        return (
            f"{head}: inconclusive: measured {joined(times(ratio) for ratio in left_out)}, also when repeated, more "
            f"than {min(count, num_separate(options['devices']))} devices can reach: the baseline was disturbed; run "
            "the study again on a quiet machine (--restart)."
        )
    return f"{head}: no speed-up, since the pipeline failed its parity check against the single-device baseline."


def _forecast_of(results: Results, options: Mapping[str, Any], mode: str, count: int, check: ForecastCheck) -> str:
    """Write the forecast with a device for each stage, or that there is none."""
    forecasts = forecasts_of(results, mode, count)
    if not forecasts:
        return "It was not forecast."
    names, forecast = max(forecasts, key=lambda group: group[1]["speedup"])
    speedup = check.corrected(forecast_speedup(results, options, mode, forecast))
    if speedup is None:
        return "Its forecast with a device for each stage is withheld."
    machine = "on the given cluster" if options["cluster"] else "with a device like these for each stage"
    kind = {"corrected": "Corrected forecast", "unchecked": "Unverified forecast"}.get(check.verdict, "Forecast")
    return f"{kind} {machine}: {times(speedup)}, cut by {names}."


def _published(mode: str, counts: Sequence[int]) -> str:
    """Quote the published speed-ups with these numbers of stages."""
    known = [count for count in counts if mode == "inference" and count in PUBLISHED]
    if not known:
        return ""
    texts = joined(times(PUBLISHED[count]) + (f" with {count}" if len(counts) > 1 else "") for count in known)
    return f" Published for another model on 4 machines: {texts}."


def _not_run(
    results: Results, options: Mapping[str, Any], mode: str, counts: Sequence[int], check: ForecastCheck
) -> Iterator[str]:
    """Forecast the numbers of stages for which there are too few devices; one sentence for those without forecast."""
    reason = f"not run, for there are only {counted(len(options['devices']), 'device')} (--oversubscribe runs it)"
    withheld, unknown = [], []
    for count in counts:
        forecasts = forecasts_of(results, mode, count)
        if not forecasts:
            unknown.append(count)
            continue
        if check.verdict == "withheld":
            withheld.append(count)
            continue
        forecast = _forecast_of(results, options, mode, count, check)
        yield f"{mode.capitalize()} with {count} stages: {reason}. {forecast}{_published(mode, (count,))}"
    if withheld:
        yield (
            f"{mode.capitalize()} with {joined(map(str, withheld))} stages: {reason}; the forecast is withheld."
            f"{_published(mode, withheld)}"
        )
    if unknown:
        yield f"{mode.capitalize()} with {joined(map(str, unknown))} stages: unknown.{_published(mode, unknown)}"


def _explained_run(why: Mapping[str, Any], runs: Sequence[MeasuredRun]) -> MeasuredRun | None:
    """The measured runs of the split that was explained."""
    return next((run for run in runs if run.run == why["run"]), None)


def _losses(results: Results, options: Mapping[str, Any], runs: Runs) -> Iterator[str]:
    for mode in options["modes"]:
        why = results.get(f"why-{mode}")
        if why is None:
            why = (
                "has a plausible speed-up"
                if any(run.implausible for run in runs[mode])
                else "was measured with a device for each stage"
            )
            yield f"{mode.capitalize()}: unknown, since no pipeline {why}."
            continue
        step_s = why["step_s"]
        parts = sorted(why["parts"], key=lambda part: part["seconds"], reverse=True)
        losses = [part for part in parts if part["seconds"] >= 0.005 * step_s]
        gains = [part for part in parts if part["seconds"] <= -0.005 * step_s]
        lost = joined(f"{part['name']} {percent(part['seconds'] / step_s)}" for part in losses)
        gained = joined(
            f"{part['name']} {percent(-part['seconds'] / step_s)}"
            + (f" ({_GAINS[part['name']]})" if part["name"] in _GAINS else "")
            for part in gains
        )
        run = _explained_run(why, runs[mode])
        speedup = why["speedup"] if run is None or run.speedup is None else run.speedup
        last = f" of the last round ({times(why['speedup'])})" if run is not None and len(run.speedups) > 1 else ""
        yield (
            f"{mode.capitalize()} with {why['stages']} stages reaches {times(speedup)} on {why['num_devices']} "
            f"devices. Of a step{last} of {format_s(step_s)}, {percent(why['ideal_s'] / step_s)} is the ideal time "
            f"(baseline ÷ {why['num_devices']}). The rest is {lost or 'nothing'}"
            + (f", minus {gained}." if gained else ".")
        )
        if losses:
            yield f"The largest loss is {losses[0]['name']}: {explain_loss(losses[0]['name'])}."


_FASTER_MICROBATCHES = "micro-batches ran faster than their share of the whole batch on one device"
_GAINS = {
    "repeated work": _FASTER_MICROBATCHES,
    "micro-batching overhead": _FASTER_MICROBATCHES,
    "smaller pieces": _FASTER_MICROBATCHES,
    "unexplained": "faster than forecast",
}
"""What a negative part means."""


def _traces(results: Results, options: Mapping[str, Any], runs: Runs) -> tuple[str, ...]:
    sentences = []
    for mode in options["modes"]:
        why = results.get(f"why-{mode}")
        run = None if why is None else _explained_run(why, runs[mode])
        if why is None or run is None:
            continue
        sentences.append(
            f"{mode.capitalize()} with {run.num_stages} stages sends {format_bytes(run.sent_bytes)} per step, in "
            f"{options['microbatches']} micro-batches over {counted(run.num_stages - 1, 'cut')}; the baseline sends "
            "nothing."
        )
        workers = "; ".join(f"worker {share['worker']}: {shares_text(share)}" for share in why["shares"])
        sentences.append(f"Time of a step: {workers}; baseline: {shares_text(why['serial_shares'][0])}.")
    return tuple(sentences) or ("Unknown: no pipeline was measured.",)


def _improvements(results: Results, options: Mapping[str, Any], runs: Runs) -> tuple[str, ...]:
    sentences = []
    for mode in options["modes"]:
        why = results.get(f"why-{mode}")
        if why is None:
            continue
        best, open_reason = known_change(results, options, mode, runs[mode])
        if open_reason:
            sentences.append(f"{mode.capitalize()}: inconclusive: {open_reason}.")
            continue
        tested = "other cuts, micro-batches, schedules and data parallel"
        sentences.append(
            f"{mode.capitalize()}: of the changes that were forecast ({tested}), none gains 1 % or more."
            if best is None
            else f"{mode.capitalize()}: {best['what']} is forecast to gain {percent(best['gain'])} samples/s, the "
            f"most of the changes that were forecast ({tested})."
        )
    return tuple(sentences) or ("Unknown: no pipeline was explained.",)
