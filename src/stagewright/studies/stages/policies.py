"""Which policy is the best, in sentences: on the model, and on the second one, which policies cut differently. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stagewright.quantity import format_bytes, format_s
from stagewright.studies.framework.forecasts import ForecastCheck
from stagewright.studies.framework.phrases import change, joined, times
from stagewright.studies.framework.study import Results
from stagewright.studies.stages.contrast import Contrast, explain_shares
from stagewright.studies.stages.measured import MeasuredRun, Runs, forecast_check, forecast_speedup, forecasts_of

DIFFERING = "stagewright study stages --model mobilenet-v2 --image-size 128 --stages 2"
"""Early units of a convolutional network have most MACs, late ones most parameters."""


def best_policies(results: Results, options: Mapping[str, Any], runs: Runs, contrast: Contrast | None) -> Iterator[str]:
    """Say which policy is the best, and why."""
    yield from _best_contrast(contrast)
    yield from _best(results, options, runs, contrast)


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
            measured = [
                run for run in runs[mode] if run.num_stages == count and run.speedup is not None and not run.shared
            ]
            if measured:
                head = f"{mode.capitalize()}, {count} stages"
                yield from _best_measured(head, measured, saved["splits"][str(count)])
            else:
                yield from _best_forecast(
                    mode, count, results, options, forecast_check(results, options, mode, runs[mode])
                )
        compared = [run for run in runs[mode] if not run.shared]
        counts = {run.num_stages for run in compared}
        if len(options["policies"]) > 1 and counts and len(compared) == len(counts):
            other = (
                f" A model in which they differ: {DIFFERING}" if contrast is None or len(contrast.ordered) < 2 else ""
            )
            yield (
                f"{mode.capitalize()}: where it was run, all policies choose the same cuts, so no measurement can tell "
                f"them apart.{other}"
            )
        if not any(run.speedup is not None for run in compared):
            why = "has a plausible speed-up" if any(run.implausible for run in runs[mode]) else "was measured"
            yield f"{mode.capitalize()}: no pipeline {why}, so no policy can be called the best."


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
        verdict = (
            f"{rates}. The best policies are {joined([best.policies, *close])}, whose difference is within the "
            "variation between runs."
            if close
            else f"{rates}. The best policy is {best.policies}."
        )
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
