"""The answers of the study *stages*: sentences made of its numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stagewright.quantity import format_bytes, format_s
from stagewright.studies.framework.phrases import joined, percent, ratio, spread, times
from stagewright.studies.framework.study import Answer, Results
from stagewright.studies.stages.measured import PUBLISHED, MeasuredRun, forecast_speedup, forecasts_of, groups_of

__all__ = ["QUESTIONS", "answers"]

Runs = Mapping[str, Sequence[MeasuredRun]]

QUESTIONS = (
    "Where does each policy cut?",
    "What speed-up does each number of stages give over serial?",
    "Which policy is best, and why?",
    "Why is the speed-up not n?",
    "What does the pipeline's trace show that serial's does not?",
    "How can it be improved?",
)


def answers(results: Results, options: Mapping[str, Any], runs: Runs) -> tuple[Answer, ...]:
    """One for each question."""
    found = (
        _where(results, options),
        _speedups(results, options, runs),
        _best(results, options, runs),
        _why(results, options, runs),
        _traces(results, options, runs),
        _improve(results, options),
    )
    return tuple(
        Answer(question=question, sentences=sentences) for question, sentences in zip(QUESTIONS, found, strict=True)
    )


def _where(results: Results, options: Mapping[str, Any]) -> tuple[str, ...]:
    sentences = []
    for mode in options["modes"]:
        saved = results.get(f"profile-{mode}")
        if saved is None:
            sentences.append(f"For {mode} this is not known: the model was not measured.")
            continue
        for count in options["stages"]:
            groups = groups_of(saved["splits"][str(count)])
            text = "; ".join(
                f"{names} after {joined(split['cut_names'])} (balance {split['balance']:.2f})"
                for names, split in groups
            )
            if text:
                sentences.append(f"For {mode}, {count} stages: {text}.")
            for policy, split in saved["splits"][str(count)].items():
                if "error" in split:
                    sentences.append(f"For {mode}, {policy} can't cut into {count} stages: {split['error']}.")
    return tuple(sentences)


def _best_of(runs: Sequence[MeasuredRun], count: int) -> MeasuredRun | None:
    mine = [one for one in runs if one.num_stages == count and one.speedup is not None]
    return max(mine, key=lambda one: one.speedup or 0.0, default=None)


def _speedups(results: Results, options: Mapping[str, Any], runs: Runs) -> tuple[str, ...]:
    sentences = []
    for mode in options["modes"]:
        for count in options["stages"]:
            best = _best_of(runs[mode], count)
            beside = ""
            if mode == "inference" and count in PUBLISHED:
                beside = f" Published, with 4 machines and another model: {times(PUBLISHED[count])}."
            if best is not None and best.speedup is not None:
                over = f", {spread(best.speedups)} over {len(best.speedups)} rounds" if len(best.speedups) > 1 else ""
                sharing = "; its stages shared devices, so this says little" if best.shared else ""
                sentences.append(
                    f"{mode.capitalize()} with {count} stages: {times(best.speedup)} "
                    f"({percent(best.speedup / count)} of {count}), {best.samples_per_s:.1f} samples/s, "
                    f"cut by {best.policies}, measured{over}{sharing}.{beside}"
                )
                continue
            unequal = [one for one in runs[mode] if one.num_stages == count]
            forecasts = forecasts_of(results, mode, count)
            if unequal:
                sentences.append(
                    f"{mode.capitalize()} with {count} stages is not equal to serial, so it has no speed-up."
                )
            elif forecasts:
                names, one = max(forecasts, key=lambda pair: pair[1]["speedup"])
                speedup = forecast_speedup(results, options, mode, one)
                where = "on the given cluster" if options["cluster"] else "if there were as many devices"
                sentences.append(
                    f"{mode.capitalize()} with {count} stages was not run ({len(options['devices'])} devices); "
                    f"forecast {where}: {times(speedup)}, cut by {names}.{beside}"
                )
            else:
                sentences.append(f"{mode.capitalize()} with {count} stages: not known.")
    return tuple(sentences)


def _best(results: Results, options: Mapping[str, Any], runs: Runs) -> tuple[str, ...]:
    sentences = []
    for mode in options["modes"]:
        saved = results.get(f"profile-{mode}")
        for count in options["stages"]:
            mine = [one for one in runs[mode] if one.num_stages == count and one.speedup is not None]
            if saved is not None and mine:
                sentences += _best_at(mode, count, mine, saved["splits"][str(count)])
            elif saved is not None:
                sentences += _best_forecast(mode, count, results, options)
        if saved is not None and not any(one.speedup is not None for one in runs[mode]):
            sentences.append(f"No pipeline of {mode} was measured, so that no policy is shown to be the best.")
    return tuple(sentences) or ("Not known: nothing was measured.",)


def _best_at(mode: str, count: int, runs: Sequence[MeasuredRun], splits: Mapping[str, Any]) -> list[str]:
    """Which policy is best with one number of stages, and why."""
    head = f"{mode.capitalize()}, {count} stages: "
    if len(runs) == 1 and not runs[0].also:
        return [f"{head}{runs[0].policies} alone was run, and gives {times(runs[0].speedup or 0.0)}."]
    if len(runs) == 1:
        return [f"{head}{runs[0].policies} cut at the same places and give {times(runs[0].speedup or 0.0)}."]
    ordered = sorted(runs, key=lambda one: one.speedup or 0.0, reverse=True)
    best, worst = ordered[0], ordered[-1]
    rates = joined(f"{one.policies} {times(one.speedup or 0.0)}" for one in ordered)
    if not best.is_apart_from(worst):
        verdict = f"{rates}: no more apart than runs of the same split are."
    else:
        level = [one for one in ordered[1:] if not best.is_apart_from(one)]
        verdict = f"{rates}: {best.policies} is best" + (
            f", not told apart from {joined(one.policies for one in level)}." if level else "."
        )
    fast, slow = splits[best.policy], splits[worst.policy]
    later = slow["bottleneck_s"] / fast["bottleneck_s"]
    pace = (
        f"The slowest stage sets the pace: of one micro-batch it takes {format_s(fast['bottleneck_s'])} with "
        f"{best.policies} (balance {fast['balance']:.2f}) and {format_s(slow['bottleneck_s'])} with {worst.policies} "
        f"(balance {slow['balance']:.2f}), {ratio(later, 1)}; measured, {worst.policies} needed "
        f"{ratio((best.speedup or 1.0) / (worst.speedup or 1.0), 1)} time."
    )
    found = [head + verdict, pace]
    if later < 0.98:
        found.append(
            f"Its stages alone would make {worst.policies} the faster one: what was measured has another cause "
            f"(they send {format_bytes(best.sent_bytes)} and {format_bytes(worst.sent_bytes)} a step), or is noise."
        )
    found += _published_claim(runs)
    return found


def _best_forecast(mode: str, count: int, results: Results, options: Mapping[str, Any]) -> list[str]:
    """Which policy is best with a number of stages that was not run."""
    splits = results[f"profile-{mode}"]["splits"][str(count)]
    found = [
        (forecast_speedup(results, options, mode, forecast), names, splits[names.split(",")[0]])
        for names, forecast in forecasts_of(results, mode, count)
    ]
    if len(found) < 2:
        return []
    found.sort(key=lambda one: -one[0])
    (_, best, fast), (_, worst, slow) = found[0], found[-1]
    rates = joined(f"{names} {times(speedup)}" for speedup, names, _ in found)
    return [
        f"{mode.capitalize()}, {count} stages, by forecast: {rates}. The slowest stage takes "
        f"{format_s(fast['bottleneck_s'])} with {best} (balance {fast['balance']:.2f}) and "
        f"{format_s(slow['bottleneck_s'])} with {worst} (balance {slow['balance']:.2f})."
    ]


def _published_claim(runs: Sequence[MeasuredRun]) -> list[str]:
    """Blocks beat MACs, it was published: does it hold here?"""
    by_policy = {name: one for one in runs for name in (one.policy, *one.also)}
    if "blocks" not in by_policy or "macs" not in by_policy:
        return []
    blocks, macs = by_policy["blocks"], by_policy["macs"]
    if blocks is macs:
        return ["Published: whole blocks beat equal MACs. Here both cut at the same places."]
    faster = (blocks.speedup or 0.0) > (macs.speedup or 0.0)
    seen = f"{times(blocks.speedup or 0.0)} against {times(macs.speedup or 0.0)}"
    if not blocks.is_apart_from(macs):
        return [f"Published: whole blocks beat equal MACs. Here they are not told apart ({seen})."]
    return [f"Published: whole blocks beat equal MACs. Here it is {'so too' if faster else 'the other way'} ({seen})."]


def _run_of(why: Mapping[str, Any], runs: Sequence[MeasuredRun]) -> MeasuredRun | None:
    """The runs of the split that was taken apart."""
    return next((one for one in runs if one.run == why["run"]), None)


def _why(results: Results, options: Mapping[str, Any], runs: Runs) -> tuple[str, ...]:
    sentences = []
    for mode in options["modes"]:
        why = results.get(f"why-{mode}")
        if why is None:
            sentences.append(f"For {mode} this is not known: no pipeline was measured and taken apart.")
            continue
        costs = sorted(why["parts"], key=lambda part: part["seconds"], reverse=True)
        shown = [part for part in costs if part["seconds"] >= 0.005 * why["step_s"]]
        gained = [part for part in costs if part["seconds"] <= -0.005 * why["step_s"]]
        text = joined(f"{part['name']} {percent(part['seconds'] / why['step_s'])}" for part in shown)
        back = joined(
            f"{part['name']} {percent(-part['seconds'] / why['step_s'])}"
            + (f" ({_GAINS[part['name']]})" if part["name"] in _GAINS else "")
            for part in gained
        )
        mine = _run_of(why, runs[mode])
        speedup = why["speedup"] if mine is None or mine.speedup is None else mine.speedup
        # One round was taken apart, the last.
        last = f" in the last round ({times(why['speedup'])})" if mine is not None and len(mine.speedups) > 1 else ""
        sentences.append(
            f"{mode.capitalize()} with {why['stages']} stages reaches {times(speedup)} of {why['num_devices']}. "
            f"Of a step of {format_s(why['step_s'])}{last}, {percent(why['ideal_s'] / why['step_s'])} is serial ÷ "
            f"{why['num_devices']}; the rest is {text or 'nothing'}" + (f", less {back}." if back else ".")
        )
        if shown:
            sentences.append(f"The largest is {shown[0]['name']}: {_MEANINGS[shown[0]['name']]}.")
    return tuple(sentences)


_MEANINGS = {
    "imbalance": "the slowest stage has more to do than the mean of all, and the others wait for it",
    "bubble": "stages wait for the first micro-batch, and have nothing left to do after the last",
    "repeated work": "what each worker does and one alone would do once, or faster in larger pieces",
    "smaller pieces": "micro-batches take longer than their share of the whole batch on one device",
    "split backward": "a backward in two halves takes longer than in one piece",
    "recomputation": "forward passes are run again",
    "transfer": "messages between stages that computing does not hide",
    "collectives": "sums over workers that computing does not hide",
    "overhead": "the executor's own work, adding up gradients, and cores that slow each other down",
    "unexplained": "time that was measured and that no forecast has; on a busy machine, what others take",
}


# What a part below nothing means.
_GAINS = {
    "repeated work": "smaller pieces took less than their share of the whole batch on one device",
    "smaller pieces": "micro-batches took less than their share of the whole batch on one device",
    "unexplained": "faster than forecast",
}


def _traces(results: Results, options: Mapping[str, Any], runs: Runs) -> tuple[str, ...]:
    sentences = []
    for mode in options["modes"]:
        why = results.get(f"why-{mode}")
        mine = None if why is None else _run_of(why, runs[mode])
        if why is None or mine is None:
            continue
        sentences.append(
            f"A step of {mode} with {mine.num_stages} stages hands {format_bytes(mine.sent_bytes)} to its links, in "
            f"{options['microbatches']} micro-batches over {mine.num_stages - 1} "
            f"cut{'s' if mine.num_stages > 2 else ''}; serial sends nothing."
        )
        serial = why["serial_shares"][0]
        each = "; ".join(f"worker {one['worker']} {_share_text(one)}" for one in why["shares"])
        sentences.append(f"Of its time, {each}. Serial: {_share_text(serial)}.")
    return tuple(sentences) or ("Not known: no pipeline was measured.",)


_SHARES = {
    "compute": "computes",
    "transfer": "handles messages",
    "collective": "is in collectives",
    "bubble": "waits as the schedule makes it",
    "wait": "waits for a late peer",
    "overhead": "is the engine's own",
}


def _share_text(share: Mapping[str, Any]) -> str:
    """ "computes 81 %, handles messages 5.0 %, …": parts of a hundredth and more."""
    parts = {name: share[f"{name}_s"] / share["step_s"] for name in _SHARES}
    return joined(f"{_SHARES[name]} {percent(part)}" for name, part in parts.items() if part >= 0.005)


def _improve(results: Results, options: Mapping[str, Any]) -> tuple[str, ...]:
    sentences = []
    for mode in options["modes"]:
        why = results.get(f"why-{mode}")
        if why is None:
            continue
        change = why["change"]
        sentences.append(
            f"{mode.capitalize()}: none of the changes that were tried (cuts, micro-batches, schedules, data parallel) "
            "is forecast to gain 1 %."
            if change is None
            else f"{mode.capitalize()}: {change['what']} is forecast to give {percent(change['gain'])} more samples/s, "
            "the most of the changes that were tried (cuts, micro-batches, schedules, data parallel)."
        )
    return tuple(sentences) or ("Not known: no pipeline was taken apart.",)
