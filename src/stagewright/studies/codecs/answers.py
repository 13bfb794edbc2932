"""The answers of the study *codecs*: sentences made of its numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stagewright.quantity import format_bytes
from stagewright.studies.codecs.measured import BITS, MeasuredCodec, part_name
from stagewright.studies.codecs.tables import between, shown_rate, shown_shape
from stagewright.studies.framework.phrases import joined, percent, times
from stagewright.studies.parts.training_recipe import Lesson
from stagewright.studies.framework.study import Answer, Results

__all__ = ["GOAL_POINTS", "GOAL_RATIO", "QUESTIONS", "answers"]

Codecs = Mapping[str, Sequence[MeasuredCodec]]

QUESTIONS = (
    "What crosses the links?",
    "What does each codec cost in accuracy?",
    "How few bytes keep the accuracy?",
    "Does sort quantisation collapse at 4 bits, and do ours?",
    "What is the true ratio?",
    "What is the transfer rate, and how does it grow with the size?",
    "On which links does a codec pay?",
)
GOAL_RATIO = 0.15
"""Of fp32 bytes."""
GOAL_POINTS = {"cifar10": 0.5}
"""Loss of accuracy that is allowed there; 1 point elsewhere."""
_COLLAPSE = 0.5  # of what was learned beyond guessing
_FEW = 0.25  # bytes of fp32 that are worth comparing with 4 bits of sort
_NOT_KNOWN = ("Not known: nothing was measured.",)


def answers(results: Results, options: Mapping[str, Any], codecs: Codecs) -> tuple[Answer, ...]:
    """One for each question."""
    found = (
        _crossing(results, options),
        _accuracy(results, options, codecs),
        _fewest(options, codecs),
        _collapse(options, codecs),
        _ratios(codecs, options),
        _rates(results, options, codecs),
        _pays(options, codecs),
    )
    return tuple(
        Answer(question=question, sentences=sentences or _NOT_KNOWN)
        for question, sentences in zip(QUESTIONS, found, strict=True)
    )


def _crossing(results: Results, options: Mapping[str, Any]) -> tuple[str, ...]:
    sentences = []
    for task, lesson in options["lessons"].items():
        found, samples = results.get(f"crossing-{task}"), results.get(f"data-{task}")
        if found is None:
            continue
        raw = found["messages"] * sum(row["raw_bytes"] for row in found["rows"] if row["codec"] == "none")
        shapes = joined(shown_shape(one) for row in found["shapes"] for one in row)
        sentences.append(
            f"{lesson.shown_data} with {lesson.model}, batch {lesson.batch}: {shapes}, after {joined(found['cuts'])}; "
            f"with their gradients back {format_bytes(raw)} a step."
        )
        if not options["epochs"]:
            continue
        weights = "pretrained weights" if lesson.weights else "random weights"
        taken = (
            f"{samples['train']} of {samples['of'][0]} samples"
            if samples is not None and samples["of"] is not None
            else "all embedded samples"
        )
        sentences.append(f"It learns from {taken}, starting with {weights}.")
        if task == "digits" and options["data"] is None:
            sentences.append("No data was given: these are the embedded digits, not what was published.")
    return tuple(sentences)


def _plain(every: Sequence[MeasuredCodec]) -> MeasuredCodec | None:
    return next((one for one in every if one.codec == "none" and one.mean is not None), None)


def _points(one: MeasuredCodec, plain: MeasuredCodec) -> float:
    assert one.mean is not None
    assert plain.mean is not None
    return plain.mean - one.mean


def _accuracy(results: Results, options: Mapping[str, Any], codecs: Codecs) -> tuple[str, ...]:
    if not options["epochs"]:
        return ("Nothing was trained: there were no epochs.",)
    sentences = []
    for task, every in codecs.items():
        sentences += _proofs(results, options, task)
        plain, name = _plain(every), options["lessons"][task].shown_data
        if plain is None:
            sentences.append(f"{name}: not known, training without a codec is missing.")
            continue
        others = [one for one in every if one.mean is not None and one is not plain]
        texts = [f"{one.codec} {one.shown} ({_change(-_points(one, plain))})" for one in others]
        sentences.append(
            f"{name}: without a codec {plain.shown}; {joined(texts)}." if texts else f"{name}: {plain.shown}."
        )
        if plain.deviation is not None and others:
            inside = [
                one.codec for one in others if abs(_points(one, plain)) <= max(plain.deviation, one.deviation or 0)
            ]
            sentences.append(
                f"No more apart from it than seeds are from each other: {joined(inside)}."
                if inside
                else "All of them are more apart from it than seeds are from each other."
            )
    return tuple(sentences)


def _proofs(results: Results, options: Mapping[str, Any], task: str) -> list[str]:
    """Whether the pipeline with a codec computes what serial does with it."""
    found = {codec: results.get(part_name(task, codec, None)) for codec in options["codecs"]}
    equal = [codec for codec, row in found.items() if row is not None and row["equal"]]
    other = [codec for codec, row in found.items() if row is not None and not row["equal"]]
    sentences = []
    if equal:
        sentences.append(
            f"A step of the real pipeline is equal to serial with the same codec: {joined(equal)}."
            + (" Trained was in one process." if options["how"] == "one-process" else "")
        )
    if other:
        sentences.append(f"Not equal to serial with the same codec, so not to be trusted: {joined(other)}.")
    return sentences


def _change(points: float) -> str:
    return f"{round(points, 1) + 0.0:+.1f}".replace("-", "−")


def _goal(task: str) -> float:
    return GOAL_POINTS.get(task, 1.0)


def _fewest(options: Mapping[str, Any], codecs: Codecs) -> tuple[str, ...]:
    sentences = []
    for task, every in codecs.items():
        plain, name = _plain(every), options["lessons"][task].shown_data
        if plain is None:
            continue
        known = [one for one in every if one.mean is not None and one is not plain and one.raw_bytes]
        good = sorted((one for one in known if _points(one, plain) <= _goal(task)), key=lambda one: one.ratio)
        limit = f"within {_goal(task):g} point{'s' if _goal(task) != 1 else ''} of no codec"
        if not good:
            sentences.append(f"{name}: none of these codecs stays {limit}.")
            continue
        best = good[0]
        goal = f"the goal of {GOAL_RATIO:g} is {'met' if best.ratio <= GOAL_RATIO else 'missed'}"
        sentences.append(
            f"{name}: {best.codec} stays {limit} with {percent(best.ratio)} of the bytes "
            f"({best.shown} against {plain.shown}); {goal}."
        )
        spread = max((one.deviation or 0.0 for one in (best, plain)), default=0.0)
        if spread > _goal(task):
            sentences.append(
                f"Seeds of {best.codec} or of no codec differ by {spread:.1f} points, more than that limit: more seeds "
                "are needed to tell."
            )
    return tuple(sentences)


def _collapse(options: Mapping[str, Any], codecs: Codecs) -> tuple[str, ...]:
    sentences = []
    for task, every in codecs.items():
        lesson: Lesson = options["lessons"][task]
        plain = _plain(every)
        if plain is None or plain.mean is None:
            continue
        guess = _guess(task)
        learned = plain.mean - guess
        four = next((one for one in every if one.codec == "sort3+1" and one.mean is not None), None)
        ours = [
            one
            for one in every
            if one.mean is not None and one.codec not in BITS and one.ratio <= _FEW and one.raw_bytes
        ]
        if four is None:
            sentences.append(f"{lesson.shown_data}: not known, sort3+1 was not trained.")
            continue
        if learned <= 2:
            sentences.append(
                f"{lesson.shown_data}: can't be told, without a codec it learned {plain.shown}, no more than guessing."
            )
            continue
        kept = ((four.mean or 0.0) - guess) / learned
        text = f"{lesson.shown_data}: sort at 4 bits reaches {four.shown} against {plain.shown}"
        text += (
            f": it loses {percent(min(1.0, 1 - kept))} of what was learned beyond guessing ({guess:g}), a collapse"
            if kept < _COLLAPSE
            else f", {_change(-_points(four, plain))} points: no collapse here"
        )
        if ours:
            text += f"; ours with at most {_FEW:g} of the bytes: " + joined(
                f"{one.codec} {one.shown} (ratio {one.ratio:.3f})" for one in ours
            )
        sentences.append(text + ".")
    return tuple(sentences)


def _guess(task: str) -> float:
    """The metric × 100 of one that always says the most frequent class."""
    return {"cifar10": 10.0, "digits": 10.0, "rte": 52.7, "cola": 0.0}.get(task, 0.0)


def _ratios(codecs: Codecs, options: Mapping[str, Any]) -> tuple[str, ...]:
    every = next((found for found in codecs.values() if any(one.raw_bytes for one in found)), [])
    sorts = [one for one in every if one.codec in BITS and one.raw_bytes]
    sentences = []
    if sorts:
        texts = [f"{one.ratio:.3f} at {BITS[one.codec]} bits" for one in sorts]
        sentences.append(
            f"Sort's codes, truly packed: {joined(texts)} of the fp32 bytes, there and back; the published code sent "
            "0.50, 0.50, 0.25 and 0.25."
        )
    others = [one for one in every if one.codec not in BITS and one.codec != "none" and one.raw_bytes]
    if others:
        sentences.append(f"Ours: {joined(f'{one.codec} {one.ratio:.3f}' for one in others)}.")
    return tuple(sentences)


def _rates(results: Results, options: Mapping[str, Any], codecs: Codecs) -> tuple[str, ...]:
    sentences: list[str] = []
    for task, every in codecs.items():
        transfer = results.get(f"transfer-{task}")
        if transfer is None:
            continue
        sizes = {int(size): int(size) / max(seconds, 1e-9) for size, seconds in transfer["sizes"].items()}
        if not sentences and sizes:
            small, large = min(sizes), max(sizes)
            sentences.append(
                f"Without a codec, {between(options)}, {format_bytes(small)} travel at {shown_rate(sizes[small])}, "
                f"{format_bytes(large)} at {shown_rate(sizes[large])}, {times(sizes[large] / sizes[small])} "
                f"as fast: a message costs {transfer['latency_s'] * 1e6:.0f} µs before its first byte."
            )
        known = [one for one in every if one.rate is not None and one.plain_rate is not None]
        ordered = sorted(known, key=lambda one: one.rate or 0.0, reverse=True)
        if ordered:
            text = joined(f"{one.codec} {shown_rate(one.rate or 0.0)}" for one in ordered)
            sentences.append(
                f"{options['lessons'][task].shown_data}, a tensor of {format_bytes(transfer['raw_bytes'])} from end to "
                f"end, encoding and decoding included: {text}."
            )
    return tuple(sentences)


def _pays(options: Mapping[str, Any], codecs: Codecs) -> tuple[str, ...]:
    sentences = []
    for task, every in codecs.items():
        known = [one for one in every if one.raw_bytes and one.codec != "none"]
        if not known:
            continue
        ordered = sorted(known, key=lambda one: one.break_even_rate, reverse=True)
        paying = [one for one in ordered if one.break_even_rate > 0]
        if paying:
            text = joined(
                f"{one.codec} {shown_rate(one.break_even_rate)}" for one in paying if one.break_even_rate < 1e12
            )
            sentences.append(f"{options['lessons'][task].shown_data}: on links slower than this they pay: {text}.")
        plain = next((one.plain_rate for one in every if one.plain_rate is not None), None)
        if plain is not None:
            here = [one.codec for one in paying if one.break_even_rate > plain]
            sentences.append(
                f"On this machine's own link ({shown_rate(plain)}) "
                + (f"{joined(here)} would pay." if here else "none of them pays: leave it alone.")
            )
    return tuple(sentences)
