"""The study *memory* in four sentences. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stagewright.quantity import format_bytes
from stagewright.studies.framework.phrases import counted, joined, percent, times
from stagewright.studies.framework.study import Results, Summary
from stagewright.studies.memory.measured import (
    MeasuredVariant,
    Variants,
    checkpointing_savings,
    ideal_speedups,
    is_possible_cost,
    shown_variant,
)
from stagewright.studies.parts.measurements import is_busy, why_busy, why_rough


def summarize(results: Results, options: Mapping[str, Any], variants: Variants) -> Summary:
    parallel = sorted(
        (variant for variant in variants.values() if variant.variant in options["strategies"] and variant.speedup),
        key=lambda variant: variant.speedup or 0.0,
        reverse=True,
    )
    if not parallel:
        return Summary(
            measured="No strategy was measured on two devices.",
            ideal="At most 2 × on two devices.",
            why="Unknown: nothing was measured.",
            advice="See which parts failed, and run the same command again.",
        )
    least = min(variants.values(), key=lambda variant: variant.peak)
    serial = variants.get("serial")
    share = f", {percent(least.peak / serial.peak)} of one device" if serial is not None else ""
    rates = joined(f"{variant.strategy} {times(variant.speedup or 0.0)}" for variant in parallel)
    ideals = [
        f"{variant.strategy} {times(ideal.free)}"
        for variant in parallel
        if (ideal := ideal_speedups(results, variant)) is not None
    ]
    return Summary(
        measured=f"{options['model']} on two devices, over one: {rates}. {shown_variant(least.variant).capitalize()} "
        f"needs the least memory: {format_bytes(least.peak)} on its largest worker{share}."
        f"{_checkpointing(results, variants)}",
        ideal=f"2 ×{_beyond(parallel)}; with free communication the same steps would reach {joined(ideals)}."
        if ideals
        else f"2 ×{_beyond(parallel)}; what free communication would reach is unknown.",
        why=f"{_why(results, parallel)}{_execution(results, options)}",
        advice=_advice(results, options, parallel, variants),
    )


def _checkpointing(results: Results, variants: Variants) -> str:
    """What activation checkpointing saves and costs over all strategies."""
    savings = checkpointing_savings(results, variants)
    measured = [row for row in savings if row.extra_time is not None]
    if not measured:
        return ""
    others = [row.strategy for row in savings if row.extra_time is None]
    more = f" ({joined(others)} by forecast)" if others else ""
    known = [row.extra_time for row in measured if row.extra_time is not None and is_possible_cost(row.extra_time)]
    time = (
        "its cost in time is inconclusive"
        if is_busy(results) or not known
        else f"takes {_range([max(0.0, cost) for cost in known])} more time"
    )
    saved = _range([row.saved for row in savings])
    return f" Activation checkpointing saves {saved} of the memory{more} and {time}."


def _range(shares: Sequence[float]) -> str:
    """12 to 39 %; one number where both are the same."""
    low, high = percent(min(shares)), percent(max(shares))
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


def _execution(results: Results, options: Mapping[str, Any]) -> str:
    """Which workers execute the same operators, and where a strategy communicates."""
    found = {strategy: row for strategy in options["strategies"] if (row := results.get(f"operators-{strategy}"))}
    same = [strategy for strategy, row in found.items() if row["is_same"]]
    other = [strategy for strategy, row in found.items() if not row["is_same"]]
    texts = [
        f"{joined(names)} execute {what} operators"
        for names, what in ((same, "the same"), (other, "different"))
        if names
    ]
    places = [
        f"{strategy} {_PLACES[strategy].format(**_num_messages(results, strategy))}"
        for strategy in options["strategies"]
        if results.get(f"executed-{strategy}")
    ]
    operators = f" The two workers of {', those of '.join(texts)}." if texts else ""
    return operators + (f" Communication: {joined(places)}." if places else "")


_PLACES = {
    "data": "all-reduces gradients ({collectives} collectives per step)",
    "tensor": "communicates within operators ({collectives} collectives)",
    "pipeline": "between operators ({sends} sends)",
}


def _num_messages(results: Results, strategy: str) -> dict[str, int]:
    workers = results[f"executed-{strategy}"].get(strategy) or []
    kinds = [worker["kinds"] for worker in workers]
    return {
        "collectives": max((int(kind.get("collective", {}).get("count", 0)) for kind in kinds), default=0),
        "sends": sum(int(kind.get("send", {}).get("count", 0)) for kind in kinds),
    }


def _beyond(parallel: list[MeasuredVariant]) -> str:
    """What a measured speed-up of more than 2 means: noise, as far as runs differ by that much anyway."""
    above = [variant for variant in parallel if (variant.speedup or 0.0) > 2]
    if not above:
        return ""
    names = joined(f"{times(variant.speedup or 0.0)} of {variant.strategy}" for variant in above)
    if max(variant.speedup or 0.0 for variant in above) <= 2 * (1 + above[0].margin):
        return f" (measured {names}: within {percent(above[0].margin)}, by which runs differ here)"
    return f" (measured {names}: a part of the model may fit into a cache that the whole does not)"


def _why(results: Results, parallel: list[MeasuredVariant]) -> str:
    texts = []
    for variant in parallel:
        forecast = (results.get(f"forecast-{variant.strategy}") or {}).get(variant.strategy)
        largest = max(forecast["parts"], key=lambda part: part["seconds"], default=None) if forecast else None
        if forecast is not None and largest is not None and largest["seconds"] > 0:
            share = percent(largest["seconds"] / forecast["step_s"])
            texts.append(f"{variant.strategy} {largest['name']} ({share} of a step)")
    because = why_rough(results)
    busy = f" Uncertain: {because}." if because else ""
    return f"The largest losses, by forecast: {joined(texts)}.{busy}" if texts else "Unknown: there is no forecast."


def _advice(results: Results, options: Mapping[str, Any], parallel: list[MeasuredVariant], variants: Variants) -> str:
    best = parallel[0]
    close = [variant.strategy for variant in parallel[1:] if not best.is_faster_than(variant)]
    choice = joined([best.strategy, *close], "or")
    text = f"Where the model fits, use {choice}{', which differ by less than noise' if close else ''}."
    if (best.speedup or 0.0) <= 1 + best.margin:
        text = (
            f"Whether any strategy is faster than one device is uncertain: {busy}."
            if (busy := why_busy(results))
            else "Where the model fits, use one device: no strategy is measurably faster."
        )
    layers = {
        variant: fit["largest"] for variant in options["fits"] if (fit := results.get(f"fit-{variant}")) is not None
    }
    if len(layers) > 1 and max(layers.values()) > min(layers.values()):
        most, fewest = max(layers, key=lambda name: layers[name]), min(layers, key=lambda name: layers[name])
        return text + (
            f" Where the model does not fit on one device, {shown_variant(most)} fits "
            f"{counted(layers[most], 'layer')} in {format_bytes(options['memory_bytes'])} per device, "
            f"{shown_variant(fewest)} fits {layers[fewest]}."
        )
    least = min(variants.values(), key=lambda variant: variant.peak)
    return f"{text} Where the model does not fit on one device, {shown_variant(least.variant)} needs the least memory."
