"""The answers of the study *memory*: sentences made of its numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagewright.quantity import format_bytes
from stagewright.studies.memory.measured import Measured, shown_way
from stagewright.studies.framework.phrases import joined, percent, spread, times
from stagewright.studies.framework.study import Answer, Results

__all__ = ["QUESTIONS", "answers"]

Ways = Mapping[str, Measured]

QUESTIONS = (
    "Which strategy gives the highest and which the lowest speed-up, and why?",
    "Is there a reason to use one that slows down?",
    "What is the ideal, with free communication?",
    "What did each worker execute?",
    "What does recomputation cost and save?",
    "Which uses least memory?",
    "How many layers fit at most?",
)
_NOT_KNOWN = ("Not known: nothing was measured.",)


def answers(results: Results, options: Mapping[str, Any], ways: Ways) -> tuple[Answer, ...]:
    """One for each question."""
    found = (
        _speed(results, ways),
        _reason(results, ways),
        _ideal(results, options, ways),
        _executed(results, options),
        _recomputation(ways),
        _least(ways),
        _layers(results, options),
    )
    return tuple(
        Answer(question=question, sentences=sentences) for question, sentences in zip(QUESTIONS, found, strict=True)
    )


def _parallel(ways: Ways) -> list[Measured]:
    """Data, tensor and pipeline without recomputation, the fastest first."""
    mine = [one for one in ways.values() if one.strategy != "serial" and not one.recompute and one.speedup is not None]
    return sorted(mine, key=lambda one: one.speedup or 0.0, reverse=True)


def _speed(results: Results, ways: Ways) -> tuple[str, ...]:
    ordered = _parallel(ways)
    if not ordered:
        return _NOT_KNOWN
    best, worst = ordered[0], ordered[-1]
    rates = joined(
        f"{one.strategy} {times(one.speedup or 0.0)}" + (f" ({spread(one.speedups)})" if len(one.speedups) > 1 else "")
        for one in ordered
    )
    sentences = [f"On two devices: {rates} over serial."]
    apart = min(best.speedups) > max(worst.speedups)
    far = len(best.speedups) > 1 or (best.speedup or 0.0) > 1.05 * (worst.speedup or 0.0)
    if best is not worst:
        sentences.append(
            f"Highest is {best.strategy}, lowest {worst.strategy}."
            if apart and far
            else f"{best.strategy.capitalize()} and {worst.strategy} are no more apart than two runs of one are."
        )
    for one in (best, worst) if best is not worst else (best,):
        cause = _cause(results, one.strategy)
        if cause:
            sentences.append(cause)
    sentences.append(
        "Published, on 2 GPUs: tensor highest, pipeline lowest (fill and drain, balance). Here "
        + (
            "that can't be told."
            if not (apart and far)
            else "the same."
            if (best.strategy, worst.strategy) == ("tensor", "pipeline")
            else f"{best.strategy} is highest and {worst.strategy} lowest."
        )
    )
    return tuple(sentences)


def _cause(results: Results, strategy: str) -> str:
    """What the forecast says that takes most from a strategy."""
    forecast = (results.get(f"forecast-{strategy}") or {}).get(strategy)
    if forecast is None:
        return ""
    largest = max(forecast["parts"], key=lambda part: part["seconds"])
    if largest["seconds"] <= 0:
        return f"For {strategy} the forecast finds nothing that takes time from it."
    share = largest["seconds"] / forecast["step_s"]
    return f"What takes most from {strategy} is, by forecast, {largest['name']}: {percent(share)} of a step."


def _reason(results: Results, ways: Ways) -> tuple[str, ...]:
    slower = [one for one in _parallel(ways) if (one.speedup or 0.0) < 1]
    serial = ways.get("serial")
    if not _parallel(ways):
        return _NOT_KNOWN
    if not slower:
        return ("None of them is slower than serial here.",)
    sentences = []
    for one in slower:
        text = f"{one.strategy.capitalize()} is slower than serial ({times(one.speedup or 0.0)})"
        if serial is not None and one.peak < serial.peak:
            text += f", but its fullest worker needs {format_bytes(one.peak)} instead of {format_bytes(serial.peak)}"
        elif serial is not None:
            text += f", and its fullest worker needs {format_bytes(one.peak)}, no less than serial"
        fits = [
            (name, found["largest"])
            for name in ("serial", one.strategy)
            if (found := (results.get("fit-forecast") or {}).get(name)) is not None and not found["refused"]
        ]
        if len(fits) == 2 and fits[1][1] > fits[0][1]:
            text += f"; so a model of {fits[1][1]} layers fits where serial ends at {fits[0][1]} (forecast)"
        sentences.append(text + ".")
    return tuple(sentences)


def _ideal(results: Results, options: Mapping[str, Any], ways: Ways) -> tuple[str, ...]:
    sentences = []
    for strategy in options["strategies"]:
        forecast = (results.get(f"forecast-{strategy}") or {}).get(strategy)
        if forecast is None:
            sentences.append(f"For {strategy} this is not known: it was not forecast.")
            continue
        measured = ways.get(strategy)
        seen = ""
        if measured is not None and measured.speedup is not None:
            share = percent(measured.speedup / forecast["free_speedup"])
            seen = f", measured {times(measured.speedup)}: {share} of the ideal"
        sentences.append(
            f"{strategy.capitalize()} would reach {times(forecast['free_speedup'])} with free communication; "
            f"forecast with this machine's {times(forecast['speedup'])}{seen}."
        )
    return tuple(sentences)


def _executed(results: Results, options: Mapping[str, Any]) -> tuple[str, ...]:
    sentences = []
    for strategy in options["strategies"]:
        workers = (results.get(f"executed-{strategy}") or {}).get(strategy)
        if workers is None:
            sentences.append(f"For {strategy} this is not known: its events were not read.")
            continue
        operators = results.get(f"operators-{strategy}")
        if operators is not None:
            number = [sum(counts[at] for counts in operators["parts"].values()) for at in (0, 1)]
            same = f"{number[0]} operators" if operators["is_same"] else f"{number[0]} and {number[1]} operators"
            sentences.append(f"{strategy.capitalize()}, {same} in a step: {operators['sentence']}.")
        counts = [
            {kind: int(one["count"]) for kind, one in sorted(worker["kinds"].items()) if kind != "step"}
            for worker in workers
        ]
        texts = [joined(f"{count} {kind}" for kind, count in one.items()) for one in counts]
        if all(one == counts[0] for one in counts):
            sentences.append(f"{strategy.capitalize()}, actions of each worker: {texts[0]}.")
        else:
            each = "; ".join(f"worker {worker['worker']} {text}" for worker, text in zip(workers, texts, strict=True))
            sentences.append(f"{strategy.capitalize()}, actions of the workers: {each}.")
    return tuple(sentences)


def _recomputation(ways: Ways) -> tuple[str, ...]:
    sentences = []
    for strategy in ("serial", "data", "tensor", "pipeline"):
        plain, again = ways.get(strategy), ways.get(f"{strategy}+recompute")
        if plain is None or again is None:
            continue
        cost = plain.samples_per_s / again.samples_per_s - 1
        saved = 1 - again.peak / plain.peak
        pays = f"costs {percent(cost)} more time" if cost > 0 else f"took no more time ({percent(-cost)} less)"
        memory = (
            f"saves {percent(saved)} of the memory ({format_bytes(plain.peak)} to {format_bytes(again.peak)})"
            if saved > 0
            else f"saves no memory ({format_bytes(plain.peak)} to {format_bytes(again.peak)})"
        )
        sentences.append(f"{strategy.capitalize()}: recomputation {pays} and {memory}.")
    return tuple(sentences) or _NOT_KNOWN


def _least(ways: Ways) -> tuple[str, ...]:
    if not ways:
        return _NOT_KNOWN
    ordered = sorted(ways.values(), key=lambda one: one.peak)
    least, most = ordered[0], ordered[-1]
    serial = ways.get("serial")
    beside = f", {percent(least.peak / serial.peak)} of serial's {format_bytes(serial.peak)}" if serial else ""
    filled = sorted(((size, kind) for kind, size in least.memory.items() if size), reverse=True)
    return (
        f"{shown_way(least.way).capitalize()} uses least: {format_bytes(least.peak)} on its fullest worker{beside}. "
        f"{shown_way(most.way).capitalize()} uses most, {format_bytes(most.peak)}.",
        f"What is left there is {joined(f'{kind} {format_bytes(size)}' for size, kind in filled)}.",
        "Published: tensor with recomputation uses least. Here "
        + ("the same." if least.way == "tensor+recompute" else f"it is {shown_way(least.way)}."),
    )


def _layers(results: Results, options: Mapping[str, Any]) -> tuple[str, ...]:
    limit = format_bytes(options["memory_bytes"])
    sentences = []
    found: dict[str, int] = {}
    for way in options["fits"]:
        fit = results.get(f"fit-{way}")
        if fit is None:
            sentences.append(f"{shown_way(way).capitalize()}: not known, its runs failed.")
            continue
        found[way] = fit["largest"]
        how = "" if fit["is_exact"] else " or more"
        close = "as forecast" if fit["forecast"] == fit["largest"] else f"forecast {fit['forecast']}"
        above = next((one for one in fit["attempts"] if not one["ran"]), None)
        beyond = f"; {above['layers']} ran out of memory" if above is not None else ""
        sentences.append(
            f"{shown_way(way).capitalize()}: {fit['largest']}{how} layers ran with {limit} on each device "
            f"({close}){beyond}."
        )
    if found:
        most = max(found, key=lambda way: found[way])
        level = [way for way in found if found[way] == found[most]]
        sentences.append(
            f"Most layers, {found[most]}, fit with {joined(shown_way(way) for way in level)}. "
            "Published: 16, with tensor and recomputation."
        )
    return tuple(sentences) or ("Not known: nothing was run under a limit.",)
