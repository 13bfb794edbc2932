"""Answers of the study *stages*, in sentences with their numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stagewright.quantity import format_bytes, format_s
from stagewright.simulator.what_if import explain_loss
from stagewright.studies.framework.forecasts import ForecastCheck
from stagewright.studies.framework.phrases import change, counted, joined, percent, spread, times
from stagewright.studies.framework.study import Answer, Results, answer_all
from stagewright.studies.stages.contrast import Contrast, explain_shares
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
        (*_best_contrast(contrast), *_best(results, options, runs, contrast)),
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
            _speedup(options, mode, count, [run for run in runs[mode] if run.num_stages == count])
            for count in options["stages"]
            if count in measured
        )
        # Before the first forecast comes its error on the cases that were run.
        if any(forecasts_of(results, mode, count) for count in others):
            yield f"{mode.capitalize()}: {check.sentence}"
        yield from _not_run(results, options, mode, others, check)


def _speedup(options: Mapping[str, Any], mode: str, count: int, runs: Sequence[MeasuredRun]) -> str:
    """The measured speed-up with one number of stages, or why there is none."""
    head = f"{mode.capitalize()} with {count} stages"
    best = max((run for run in runs if run.speedup is not None), key=lambda run: run.speedup or 0.0, default=None)
    if best is not None and best.speedup is not None:
        rounds = f" ({spread(best.speedups)} over {len(best.speedups)} rounds)" if len(best.speedups) > 1 else ""
        sharing = " Its stages shared devices, so this is no meaningful speed-up." if best.shared else ""
        ideal = min(count, len(set(options["devices"])))
        share = (
            f"which is {percent(best.speedup / ideal)} of the ideal {ideal} ×"
            if best.speedup <= ideal
            else f"more than the ideal {ideal} ×: a whole batch on one device is less efficient than micro-batches "
            "(caches), or was disturbed"
        )
        return (
            f"{head}: measured {times(best.speedup)}{rounds}, {share}, at {best.samples_per_s:.1f} samples/s, cut by "
            f"{best.policies}.{sharing}{_published(mode, (count,))}"
        )
    left_out = [ratio for run in runs for ratio in run.implausible]
    if left_out:
        return (
            f"{head}: inconclusive: measured {joined(times(ratio) for ratio in left_out)}, also when repeated, more "
            f"than {min(count, len(set(options['devices'])))} devices can reach: the baseline was disturbed; run the "
            "study again on a quiet machine (--restart)."
        )
    return f"{head}: no speed-up, since the pipeline failed its parity check against the single-device baseline."


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
    machine = "on the given cluster" if options["cluster"] else "with a device like these for each stage"
    reason = f"not run, for there are only {counted(len(options['devices']), 'device')} (--oversubscribe runs it)"
    withheld, unknown = [], []
    for count in counts:
        forecasts = forecasts_of(results, mode, count)
        if not forecasts:
            unknown.append(count)
            continue
        names, forecast = max(forecasts, key=lambda group: group[1]["speedup"])
        speedup = check.corrected(forecast_speedup(results, options, mode, forecast))
        if speedup is None:
            withheld.append(count)
            continue
        kind = {"corrected": "Corrected forecast", "unchecked": "Unverified forecast"}.get(check.verdict, "Forecast")
        yield (
            f"{mode.capitalize()} with {count} stages: {reason}. {kind} {machine}: {times(speedup)}, cut by {names}."
            f"{_published(mode, (count,))}"
        )
    if withheld:
        yield (
            f"{mode.capitalize()} with {joined(map(str, withheld))} stages: {reason}; the forecast is withheld."
            f"{_published(mode, withheld)}"
        )
    if unknown:
        yield f"{mode.capitalize()} with {joined(map(str, unknown))} stages: unknown.{_published(mode, unknown)}"


def _best_contrast(contrast: Contrast | None) -> Iterator[str]:
    """The best policy for the second model."""
    if contrast is None:
        return
    head = f"{contrast.model}, {contrast.mode}, 2 stages"
    if len(contrast.ordered) > 1:
        yield from _best_measured(head, contrast.ordered, contrast.splits)
        yield explain_shares(contrast)
    elif contrast.ordered:
        yield f"{head}: {contrast.ordered[0].policies} cut it alike too; --contrast MODEL names another model."
    else:
        yield f"{head}: unknown, since no pipeline was measured."


def _best(results: Results, options: Mapping[str, Any], runs: Runs, contrast: Contrast | None) -> Iterator[str]:
    for mode in options["modes"]:
        saved = results.get(f"profile-{mode}")
        if saved is None:
            continue
        for count in options["stages"]:
            measured = [run for run in runs[mode] if run.num_stages == count and run.speedup is not None]
            if measured:
                head = f"{mode.capitalize()}, {count} stages"
                yield from _best_measured(head, measured, saved["splits"][str(count)])
            else:
                yield from _best_forecast(
                    mode, count, results, options, forecast_check(results, options, mode, runs[mode])
                )
        counts = {run.num_stages for run in runs[mode]}
        if len(options["policies"]) > 1 and counts and len(runs[mode]) == len(counts):
            other = (
                f" A model in which they differ: {DIFFERING}" if contrast is None or len(contrast.ordered) < 2 else ""
            )
            yield (
                f"{mode.capitalize()}: where it was run, all policies choose the same cuts, so no measurement can tell "
                f"them apart.{other}"
            )
        if not any(run.speedup is not None for run in runs[mode]):
            why = "has a plausible speed-up" if any(run.implausible for run in runs[mode]) else "was measured"
            yield f"{mode.capitalize()}: no pipeline {why}, so no policy can be called the best."


DIFFERING = "stagewright study stages --model mobilenet-v2 --image-size 128 --stages 2"
"""Early units of a convolutional network have most MACs, late ones most parameters."""


def _best_measured(head: str, runs: Sequence[MeasuredRun], splits: Mapping[str, Any]) -> list[str]:
    """The best policy for a number of stages that was run, and the reason."""
    if len(runs) == 1:
        reason = "choose the same cuts and reach" if runs[0].also else "was the only policy that was run; it reaches"
        return [f"{head}: {runs[0].policies} {reason} {times(runs[0].speedup or 0.0)}."]
    ordered = sorted(runs, key=lambda run: run.speedup or 0.0, reverse=True)
    best, worst = ordered[0], ordered[-1]
    rates = joined(f"{run.policies} {times(run.speedup or 0.0)}" for run in ordered)
    if not best.differs_from(worst):
        verdict = f"{rates}. The difference is within the variation between runs of the same split."
    else:
        close = [run.policies for run in ordered[1:] if not best.differs_from(run)]
        within = f" (within the variation between runs: {joined(close)})" if close else ""
        verdict = f"{rates}. The best policy is {best.policies}{within}."
    is_different = best.differs_from(worst)
    fast, slow = splits[best.policy], splits[worst.policy]
    relative = slow["bottleneck_s"] / fast["bottleneck_s"]
    profile = (
        f"The bottleneck stage limits the throughput: by the profile, it takes {format_s(fast['bottleneck_s'])} per "
        f"micro-batch with {best.policies} (balance {fast['balance']:.2f}) and {format_s(slow['bottleneck_s'])} with "
        f"{worst.policies} (balance {slow['balance']:.2f}), {change(relative, 1)}."
    )
    sentences = [f"{head}: {verdict}", profile]
    if is_different:
        slowdown = change((best.speedup or 1.0) / (worst.speedup or 1.0), 1)
        sentences[-1] += f" Measured steps with {worst.policies} take {slowdown} time."
    if is_different and relative < 0.98:
        sentences.append(
            f"By its bottleneck stage {worst.policies} should be faster: the measured difference has another cause "
            f"(per step they send {format_bytes(best.sent_bytes)} and {format_bytes(worst.sent_bytes)}), or is noise."
        )
    return sentences + _published_claim(runs)


def _best_forecast(
    mode: str, count: int, results: Results, options: Mapping[str, Any], check: ForecastCheck
) -> list[str]:
    """The best policy for a number of stages that was only forecast."""
    splits = results[f"profile-{mode}"]["splits"][str(count)]
    speedups = [
        (check.corrected(forecast_speedup(results, options, mode, forecast)), names, splits[names.split(",")[0]])
        for names, forecast in forecasts_of(results, mode, count)
    ]
    ordered = sorted(
        ((speedup, names, split) for speedup, names, split in speedups if speedup is not None),
        key=lambda group: -group[0],
    )
    if len(ordered) < 2:
        return []
    (_, best, fast), (_, worst, slow) = ordered[0], ordered[-1]
    rates = joined(f"{names} {times(speedup)}" for speedup, names, _ in ordered)
    return [
        f"{mode.capitalize()}, {count} stages, forecast: {rates}. The bottleneck stage takes "
        f"{format_s(fast['bottleneck_s'])} with {best} (balance {fast['balance']:.2f}) and "
        f"{format_s(slow['bottleneck_s'])} with {worst} (balance {slow['balance']:.2f})."
    ]


def _published_claim(runs: Sequence[MeasuredRun]) -> list[str]:
    """Whether the published claim "blocks beat MACs" holds here."""
    by_policy = {name: run for run in runs for name in (run.policy, *run.also)}
    if "blocks" not in by_policy or "macs" not in by_policy:
        return []
    blocks, macs = by_policy["blocks"], by_policy["macs"]
    claim = "Published: splitting by whole blocks beats splitting by equal MACs."
    if blocks is macs:
        return [f"{claim} Here both choose the same cuts."]
    numbers = f"{times(blocks.speedup or 0.0)} and {times(macs.speedup or 0.0)}"
    if not blocks.differs_from(macs):
        return [f"{claim} Here the difference is within the variation between runs ({numbers})."]
    faster = (blocks.speedup or 0.0) > (macs.speedup or 0.0)
    return [f"{claim} Here {'this holds too' if faster else 'it is the other way round'} ({numbers})."]


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
                else "was measured and explained"
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
        workers = "; ".join(f"worker {share['worker']}: {_breakdown(share)}" for share in why["shares"])
        sentences.append(f"Time of a step: {workers}; baseline: {_breakdown(why['serial_shares'][0])}.")
    return tuple(sentences) or ("Unknown: no pipeline was measured.",)


_CATEGORIES = {
    "compute": "compute",
    "transfer": "sends and receives",
    "collective": "collectives",
    "bubble": "pipeline bubble",
    "wait": "waiting for a late peer",
    "overhead": "engine overhead",
}


def _breakdown(share: Mapping[str, Any]) -> str:
    """Write "compute 81 %, sends and receives 5.0 %, …" with every category of 0.5 % and more."""
    shares = {name: share[f"{name}_s"] / share["step_s"] for name in _CATEGORIES}
    return ", ".join(f"{_CATEGORIES[name]} {percent(part)}" for name, part in shares.items() if part >= 0.005)


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
