"""Answers of the study *memory*, in sentences with their numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stagewright.quantity import format_bytes
from stagewright.studies.framework.phrases import change, counted, joined, percent, spread, times
from stagewright.studies.framework.study import Answer, Results, answer_all
from stagewright.studies.memory.measured import (
    NOISE,
    MeasuredVariant,
    Variants,
    checkpointing_savings,
    ideal_speedups,
    is_possible_cost,
    shown_loss,
    shown_variant,
)
from stagewright.studies.parts.measurements import why_busy

QUESTIONS = (
    "Which strategy has the highest speed-up, which the lowest, and why?",
    "Is there a reason to use a strategy that is slower than one device?",
    "What is the ideal speed-up, with free communication?",
    "What does each worker execute?",
    "What does activation checkpointing cost and save?",
    "Which strategy uses the least memory?",
    "How many layers fit at most?",
)
EVIDENCE: Mapping[str, tuple[str, ...]] = {
    QUESTIONS[0]: ("Speed and memory",),
    QUESTIONS[3]: ("Actions of each worker",),
    QUESTIONS[4]: ("Cost and savings",),
    QUESTIONS[6]: ("Most layers",),
}
"""Beginnings of the titles and names of the tables and figures behind each answer."""


def answers(results: Results, options: Mapping[str, Any], variants: Variants) -> tuple[Answer, ...]:
    replies = (
        _speedups(results, variants),
        _slow_strategies(results, options, variants),
        _ideal(results, options, variants),
        _executed(results, options),
        _checkpointing(results, options, variants),
        _least_memory(results, variants),
        _most_layers(results, options),
    )
    return answer_all(QUESTIONS, replies)


def _by_speedup(variants: Variants) -> list[MeasuredVariant]:
    """Data, tensor and pipeline without activation checkpointing, the fastest first."""
    parallel = [
        variant
        for variant in variants.values()
        if variant.strategy != "serial" and not variant.recompute and variant.speedup is not None
    ]
    return sorted(parallel, key=lambda variant: variant.speedup or 0.0, reverse=True)


def _speedups(results: Results, variants: Variants) -> tuple[str, ...]:
    ordered = _by_speedup(variants)
    flagged = tuple(
        f"Left out: {shown_variant(name)} {joined(map(times, variant.implausible))}, more than its devices can reach: "
        "the baseline was disturbed; run the study again on a quiet machine (--restart)."
        for name, variant in variants.items()
        if variant.implausible
    )
    if not ordered:
        return flagged
    best, worst = ordered[0], ordered[-1]
    rates = joined(
        f"{variant.strategy} {times(variant.speedup or 0.0)}"
        + (f" ({spread(variant.speedups)})" if len(variant.speedups) > 1 else "")
        for variant in ordered
    )
    sentences = [f"Speed-up on two devices over the fastest run on one: {rates}."]
    is_different = best.is_faster_than(worst)
    # Neither is called so unless it also differs from the next one.
    fastest = [variant.strategy for variant in ordered if not best.is_faster_than(variant)]
    slowest = [variant.strategy for variant in ordered if not variant.is_faster_than(worst)]
    if best is not worst:
        sentences.append(
            f"{joined(fastest, 'or').capitalize()} is the fastest, {joined(slowest, 'or')} the slowest."
            if is_different
            else f"The difference between {best.strategy} and {worst.strategy} is within the variation between runs."
        )
    losses = [_largest_loss(results, variant.strategy) for variant in ordered]
    sentences += [sentence for sentence in losses if sentence]
    comparison = (
        "they can't be told apart"
        if not is_different
        else "it is the same"
        if (fastest, slowest) == (["tensor"], ["pipeline"])
        else f"{joined(fastest, 'or')} is the fastest and {joined(slowest, 'or')} the slowest"
    )
    if best is not worst:
        sentences.append(
            "Published, on 2 GPUs: tensor is the fastest and pipeline the slowest (pipeline bubble, load imbalance). "
            f"Here {comparison}."
        )
    return (*sentences, *flagged)


def _largest_loss(results: Results, strategy: str) -> str:
    """What costs a strategy the most, by forecast."""
    forecast = (results.get(f"forecast-{strategy}") or {}).get(strategy)
    if forecast is None:
        return ""
    largest = max(forecast["parts"], key=lambda part: part["seconds"])
    if largest["seconds"] <= 0:
        return f"The forecast finds no loss for {strategy}."
    share = percent(largest["seconds"] / forecast["step_s"])
    return f"The largest loss of {strategy} is {shown_loss(largest['name'])}: {share} of a step, by forecast."


_SLOWER = 0.95  # a speed-up below it in every round is a slow-down


def _slow_strategies(results: Results, options: Mapping[str, Any], variants: Variants) -> tuple[str, ...]:
    parallel = _by_speedup(variants)
    if not parallel:
        return ()
    limits = {
        variant.variant: 1 / (1 + variant.margin) if len(variant.speedups) == 1 else _SLOWER for variant in parallel
    }
    slower = [variant for variant in parallel if max(variant.speedups) < limits[variant.variant]]
    unclear = [
        variant for variant in parallel if variant not in slower and min(variant.speedups) < 1 / limits[variant.variant]
    ]
    if not slower and unclear:
        names = joined(f"{variant.strategy} ({times(variant.speedup or 0.0)})" for variant in unclear)
        return (
            f"Whether one is slower is inconclusive for {names}: too close to one device for "
            f"{counted(options['rounds'], 'round')}.",
            *_memory_reason(results, variants),
        )
    if not slower:
        return ("None of them is slower than one device here.", *_memory_reason(results, variants))
    serial = variants.get("serial")
    fits = results.get("fit-forecast") or {}
    sentences = []
    for variant in slower:
        text = f"{variant.strategy.capitalize()} is slower than one device ({times(variant.speedup or 0.0)})"
        if serial is not None and variant.peak < serial.peak:
            text += (
                f", but its workers need at most {format_bytes(variant.peak)} instead of {format_bytes(serial.peak)}"
            )
        elif serial is not None:
            text += f", and its workers need up to {format_bytes(variant.peak)}, no less than one device"
        layers = [
            fits[name]["largest"] for name in ("serial", variant.strategy) if name in fits and not fits[name]["refused"]
        ]
        if len(layers) == 2 and layers[1] > layers[0]:
            text += f"; so {layers[1]} layers fit where one device fits {layers[0]} (forecast)"
        sentences.append(text + ".")
    return tuple(sentences)


def _memory_reason(results: Results, variants: Variants) -> Iterator[str]:
    """Why a slower strategy may still be used: a model that does not fit on one device."""
    serial = variants.get("serial")
    smaller = [variant for variant in variants.values() if serial is not None and variant.peak < serial.peak]
    smaller = [variant for variant in smaller if variant.strategy != "serial"]
    if serial is None or not smaller:
        return
    least = min(smaller, key=lambda variant: variant.peak)
    fits = results.get("fit-forecast") or {}
    layers = {name: fits[name]["largest"] for name in ("serial", least.variant) if "largest" in fits.get(name, {})}
    more = (
        f", so {layers[least.variant]} layers fit where one device fits {layers['serial'] or 'none'} (forecast)"
        if len(layers) == 2 and layers[least.variant] > layers["serial"]
        else ""
    )
    yield (
        f"A slower strategy may still be needed for its memory: {shown_variant(least.variant)} needs "
        f"{format_bytes(least.peak)} on its largest worker instead of {format_bytes(serial.peak)}{more}."
    )


_ENDLESS = {
    "data": "one sample per device, while every replica repeats the optimizer step",
    "tensor": "what is left is the work that every worker repeats",
    "pipeline": "the largest unit, which can't be split, sets the pace of an endless stream",
}


def _ideal(results: Results, options: Mapping[str, Any], variants: Variants) -> Iterator[str]:
    because = why_busy(results)
    for strategy in options["strategies"]:
        measured = variants.get(strategy)
        ideal = ideal_speedups(results, measured)
        if ideal is None or measured is None or measured.speedup is None:
            yield f"{strategy.capitalize()}: unknown, since its steps were not measured and recorded."
            continue
        endless = "no bound" if ideal.endless is None else times(ideal.endless)
        # The difference between the workers' compute and one device's, which is a small one of two noisy numbers.
        unlimited = f", and on any number of devices {endless}: {_ENDLESS[strategy]}" if not because else ""
        yield (
            f"{strategy.capitalize()}: measured {times(measured.speedup)}; with free communication at most "
            f"{times(ideal.free)} ({percent(measured.speedup / ideal.free)} reached), with perfect balance too "
            f"{times(ideal.balanced)}{unlimited}."
        )
    if any(f"ideal-{strategy}" in results for strategy in options["strategies"]):
        yield (
            "Each ideal repeats the measured compute of the same steps without messages, waits and gaps, so no run can "
            "beat it. What is left between it and the number of devices is work that is repeated, slowed down by the "
            "other core, or less efficient in smaller pieces."
        )
        if because:
            yield f"What any number of devices would reach is inconclusive: {because}."


_COUNTED = (
    "Operators are torch's, under its profiler; actions are Stagewright's, each of many operators. The computation of "
    "the loss counts as a forward, and a collective of actions may be several of torch's, or none where workers share "
    "memory."
)


_ACTIONS = {"optimizer": "optimizer step", "recompute": "recomputed forward"}
"""Kinds of actions as people name them, where a trace abbreviates."""


def _executed(results: Results, options: Mapping[str, Any]) -> Iterator[str]:
    for strategy in options["strategies"]:
        workers = (results.get(f"executed-{strategy}") or {}).get(strategy)
        if workers is None:
            yield f"{strategy.capitalize()}: unknown, since its trace was not read."
            continue
        operators = results.get(f"operators-{strategy}")
        if operators is not None:
            totals = [sum(counts[worker] for counts in operators["parts"].values()) for worker in (0, 1)]
            number = "" if operators["is_same"] else f", {totals[0]} and {totals[1]} operators per step"
            yield f"{strategy.capitalize()}{number}: {operators['sentence']}."
        counts = [
            {kind: int(entry["count"]) for kind, entry in sorted(worker["kinds"].items()) if kind != "step"}
            for worker in workers
        ]
        texts = [
            joined(counted(count, _ACTIONS.get(kind, kind)) for kind, count in actions.items()) for actions in counts
        ]
        if all(actions == counts[0] for actions in counts):
            yield f"{strategy.capitalize()}, actions of every worker: {texts[0]}."
        else:
            each = "; ".join(f"worker {worker['worker']}: {text}" for worker, text in zip(workers, texts, strict=True))
            yield f"{strategy.capitalize()}, actions of each worker; {each}."
    if any(f"executed-{strategy}" in results for strategy in options["strategies"]):
        yield _COUNTED


def _checkpointing(results: Results, options: Mapping[str, Any], variants: Variants) -> Iterator[str]:
    forecast = []
    for row in checkpointing_savings(results, variants):
        sizes = f"({format_bytes(row.without_bytes)} to {format_bytes(row.with_bytes)})"
        share = f"{percent(row.saved)} of the" if row.saved > 0 else "no"
        name = shown_variant(row.strategy).capitalize()
        if row.extra_time is None:
            forecast.append(row.strategy)
            yield f"{name}: by forecast, activation checkpointing saves {share} memory {sizes}."
            continue
        time = _checkpointing_time(row.extra_time, because=why_busy(results))
        yield f"{name}: activation checkpointing {time} and saves {share} memory {sizes}."
    if forecast:
        quick = " --quick" if options.get("quick") else ""
        yield (
            f"With {joined(forecast)} it was not run; this does: stagewright study memory --checkpointing "
            f"{','.join(('serial', *options['strategies']))}{quick}"
        )


def _checkpointing_time(cost: float, *, because: str) -> str:
    """What activation checkpointing costs in time; unknown where that is impossible, or `because` of a busy machine."""
    if because and is_possible_cost(cost):
        return f"costs an uncertain amount of time (measured {change(1 + cost, 1)}, but {because})"
    if abs(cost) <= NOISE:
        return f"costs no measurable time ({change(1 + cost, 1)})"
    if not is_possible_cost(cost):
        impossible = "less, though it repeats forwards" if cost < 0 else "more, though it repeats no more than forwards"
        return f"has an unknown cost in time (measured {percent(abs(cost))} {impossible}: a run was disturbed)"
    return f"costs {percent(cost)} more time"


def _least_memory(results: Results, variants: Variants) -> tuple[str, ...]:
    if not variants:
        return ()
    ordered = sorted(variants.values(), key=lambda variant: variant.peak)
    least, most = ordered[0], ordered[-1]
    serial = variants.get("serial")
    share = f", {percent(least.peak / serial.peak)} of the {format_bytes(serial.peak)} on one device" if serial else ""
    categories = sorted(((size, name) for name, size in least.memory.items() if size), reverse=True)
    verdict = "it is the same" if least.variant == "tensor+recompute" else f"it is {shown_variant(least.variant)}"
    return (
        f"{shown_variant(least.variant).capitalize()} uses the least: {format_bytes(least.peak)} on the largest "
        f"worker{share}. {shown_variant(most.variant).capitalize()} uses the most, {format_bytes(most.peak)}.",
        *_forecast_peaks(results, variants),
        f"It consists of {joined(f'{name} {format_bytes(size)}' for size, name in categories)}.",
        f"Published: tensor with activation checkpointing uses the least. Here {verdict}.",
    )


def _forecast_peaks(results: Results, variants: Variants) -> Iterator[str]:
    """What strategies with checkpointing need that were not run."""
    others = [row for row in checkpointing_savings(results, variants) if row.extra_time is None]
    if others:
        peaks = joined(f"{row.strategy} {format_bytes(row.with_bytes)}" for row in others)
        yield f"By forecast, with checkpointing: {peaks}."


def _layers(count: int, more: str = "") -> str:
    return f"{count}{more} layers" if more else counted(count, "layer")


def _most_layers(results: Results, options: Mapping[str, Any]) -> tuple[str, ...]:
    limit = format_bytes(options["memory_bytes"])
    sentences = []
    layers: dict[str, int] = {}
    for variant in options["fits"]:
        name = shown_variant(variant).capitalize()
        fit = results.get(f"fit-{variant}")
        if fit is None:
            sentences.append(f"{name}: unknown, since its runs failed.")
            continue
        layers[variant] = fit["largest"]
        more = "" if fit["is_exact"] else " or more"
        forecast = "as forecast" if fit["forecast"] == fit["largest"] else f"forecast {fit['forecast']}"
        failed = next((attempt["layers"] for attempt in fit["attempts"] if not attempt["ran"]), None)
        limit_text = f"; {failed} ran out of memory" if failed is not None else ""
        sentences.append(
            f"{name}: {_layers(fit['largest'], more)} ran with {limit} per device ({forecast}){limit_text}."
        )
    if layers:
        most = max(layers.values())
        best = joined(shown_variant(variant) for variant, count in layers.items() if count == most)
        sentences.append(
            f"The most layers, {most}, fit with {best}. Published: 16, with tensor and activation checkpointing."
        )
    return tuple(sentences) or ("Not studied; this does: stagewright study memory --fits data,tensor+recompute",)
