"""Answers of the study *codecs*, in sentences with their numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stagewright.quantity import format_bytes
from stagewright.studies.codecs.measured import BITS, MeasuredCodec, part_name
from stagewright.studies.codecs.tables import shown_link, shown_rate, shown_shape
from stagewright.studies.framework.phrases import joined, percent, signed, times
from stagewright.studies.framework.study import Answer, Results, answer_all
from stagewright.studies.parts.training_recipe import TrainingRecipe

Codecs = Mapping[str, Sequence[MeasuredCodec]]

QUESTIONS = (
    "What crosses the links?",
    "What does each codec cost in accuracy?",
    "How few bytes keep the accuracy?",
    "Does sort quantization collapse at 4 bits, and do Stagewright's codecs?",
    "What is the compression ratio?",
    "What is the transfer rate, and how does it depend on the size?",
    "On which links does a codec save time?",
)
GOAL_RATIO = 0.15
"""Of fp32 bytes."""
GOAL_POINTS = {"cifar10": 0.5}
"""Allowed loss of accuracy in points; 1 for other tasks."""
_COLLAPSE = 0.5  # share of the accuracy above chance that a collapse loses at least
_FEW = 0.25  # codecs with at most this share of the fp32 bytes are compared with sort at 4 bits
_CHANCE = {"cifar10": 10.0, "digits": 10.0, "rte": 52.7, "cola": 0.0}
"""Metric × 100 of a model that always predicts the most frequent class."""


def answers(results: Results, options: Mapping[str, Any], codecs: Codecs) -> tuple[Answer, ...]:
    replies = (
        _crossing(results, options),
        _accuracy(results, options, codecs),
        _fewest_bytes(options, codecs),
        _collapse(options, codecs),
        _ratios(codecs),
        _transfer_rates(results, options, codecs),
        _break_even(options, codecs),
    )
    return answer_all(QUESTIONS, replies)


def _crossing(results: Results, options: Mapping[str, Any]) -> Iterator[str]:
    for task, recipe in options["recipes"].items():
        crossing, samples = results.get(f"crossing-{task}"), results.get(f"data-{task}")
        if crossing is None:
            continue
        raw = crossing["messages"] * sum(row["raw_bytes"] for row in crossing["rows"] if row["codec"] == "none")
        shapes = joined(shown_shape(shape) for row in crossing["shapes"] for shape in row)
        yield (
            f"{recipe.model} on {recipe.shown_data}, batch {recipe.batch}: {shapes}, after {joined(crossing['cuts'])}; "
            f"with the gradients in return {format_bytes(raw)} per step."
        )
        if not options["epochs"]:
            continue
        weights = "pretrained weights" if recipe.weights else "random weights"
        used = (
            f"{samples['train']} of {samples['of'][0]} samples"
            if samples is not None and samples["of"] is not None
            else "all embedded samples"
        )
        yield f"It is trained on {used}, starting with {weights}."
        if task == "digits" and options["data"] is None:
            yield "No data was given: these are the embedded digits, not the published data sets."


def _without_codec(measured: Sequence[MeasuredCodec]) -> MeasuredCodec | None:
    return next((codec for codec in measured if codec.codec == "none" and codec.mean is not None), None)


def _lost_points(codec: MeasuredCodec, reference: MeasuredCodec) -> float:
    assert codec.mean is not None
    assert reference.mean is not None
    return reference.mean - codec.mean


def _accuracy(results: Results, options: Mapping[str, Any], codecs: Codecs) -> Iterator[str]:
    if not options["epochs"]:
        yield "Nothing was trained, since epochs is 0."
        return
    for task, measured in codecs.items():
        yield from _parity(results, options, task)
        reference, name = _without_codec(measured), options["recipes"][task].shown_data
        if reference is None:
            yield f"{name}: unknown, since the training without a codec is missing."
            continue
        others = [codec for codec in measured if codec.mean is not None and codec is not reference]
        texts = [f"{codec.codec} {codec.shown} ({signed(-_lost_points(codec, reference))})" for codec in others]
        yield f"{name}: without a codec {reference.shown}" + (f"; {joined(texts)}." if texts else ".")
        if reference.deviation is None or not others:
            continue
        within = [
            codec.codec
            for codec in others
            if abs(_lost_points(codec, reference)) <= max(reference.deviation, codec.deviation or 0)
        ]
        yield (
            f"The difference is within the variation between seeds for {joined(within)}."
            if within
            else "All of them differ from it by more than seeds differ from each other."
        )


def _parity(results: Results, options: Mapping[str, Any], task: str) -> Iterator[str]:
    """Whether the pipeline with a codec computes the same as the single-device baseline with it."""
    checks = {codec: results.get(part_name(task, codec, None)) for codec in options["codecs"]}
    passed = [codec for codec, row in checks.items() if row is not None and row["equal"]]
    failed = [codec for codec, row in checks.items() if row is not None and not row["equal"]]
    if passed:
        yield (
            f"One pipeline step passes the parity check against one device with the same codec: {joined(passed)}."
            + (" Training itself ran in one process." if options["how"] == "one-process" else "")
        )
    if failed:
        yield f"Parity check failed, so these results are not reliable: {joined(failed)}."


def _fewest_bytes(options: Mapping[str, Any], codecs: Codecs) -> Iterator[str]:
    for task, measured in codecs.items():
        reference, name = _without_codec(measured), options["recipes"][task].shown_data
        goal = GOAL_POINTS.get(task, 1.0)
        if reference is None:
            continue
        trained = [codec for codec in measured if codec.mean is not None and codec is not reference and codec.raw_bytes]
        good = sorted(
            (codec for codec in trained if _lost_points(codec, reference) <= goal), key=lambda codec: codec.ratio
        )
        limit = f"within {goal:g} point{'s' if goal != 1 else ''} of the accuracy without a codec"
        if not good:
            yield f"{name}: none of these codecs stays {limit}."
            continue
        best = good[0]
        yield (
            f"{name}: {best.codec} stays {limit} with {percent(best.ratio)} of the bytes ({best.shown} instead of "
            f"{reference.shown}); the goal of {GOAL_RATIO:g} is {'met' if best.ratio <= GOAL_RATIO else 'missed'}."
        )
        deviation = max(best.deviation or 0.0, reference.deviation or 0.0)
        if deviation > goal:
            yield (
                f"The standard deviation over seeds, {deviation:.1f} points, is larger than that limit: a conclusion "
                "needs more seeds."
            )


def _collapse(options: Mapping[str, Any], codecs: Codecs) -> Iterator[str]:
    for task, measured in codecs.items():
        recipe: TrainingRecipe = options["recipes"][task]
        reference = _without_codec(measured)
        if reference is None or reference.mean is None:
            continue
        chance = _CHANCE.get(task, 0.0)
        learned = reference.mean - chance
        sort = next((codec for codec in measured if codec.codec == "sort3+1" and codec.mean is not None), None)
        if sort is None:
            yield f"{recipe.shown_data}: unknown, since sort3+1 was not trained."
            continue
        if learned <= 2:
            yield (
                f"{recipe.shown_data}: unknown, since training without a codec reached {reference.shown}, no more than "
                "chance."
            )
            continue
        kept = ((sort.mean or 0.0) - chance) / learned
        text = f"{recipe.shown_data}: sort at 4 bits reaches {sort.shown} instead of {reference.shown}"
        text += (
            f": it loses {percent(min(1.0, 1 - kept))} of the accuracy above chance ({chance:g}), a collapse"
            if kept < _COLLAPSE
            else f", {signed(-_lost_points(sort, reference))} points: no collapse"
        )
        small = [
            f"{codec.codec} {codec.shown} (ratio {codec.ratio:.3f})"
            for codec in measured
            if codec.mean is not None and codec.codec not in BITS and codec.ratio <= _FEW and codec.raw_bytes
        ]
        if small:
            text += f"; Stagewright's codecs with at most {_FEW:g} of the bytes: {joined(small)}"
        yield text + "."


def _ratios(codecs: Codecs) -> Iterator[str]:
    measured = next((codec for codec in codecs.values() if any(row.raw_bytes for row in codec)), [])
    sent = [codec for codec in measured if codec.raw_bytes]
    sorts = [f"{codec.ratio:.3f} at {BITS[codec.codec]} bits" for codec in sent if codec.codec in BITS]
    others = [f"{codec.codec} {codec.ratio:.3f}" for codec in sent if codec.codec not in BITS and codec.codec != "none"]
    if sorts:
        yield (
            f"Sort quantization, with packed codes: {joined(sorts)} of the fp32 bytes, forward and backward; the "
            "published code sent 0.50, 0.50, 0.25 and 0.25."
        )
    if others:
        yield f"Stagewright's codecs: {joined(others)}."


def _transfer_rates(results: Results, options: Mapping[str, Any], codecs: Codecs) -> tuple[str, ...]:
    sentences: list[str] = []
    for task, measured in codecs.items():
        transfer = results.get(f"transfer-{task}")
        if transfer is None:
            continue
        rates = {int(size): int(size) / max(seconds, 1e-9) for size, seconds in transfer["sizes"].items()}
        if not sentences and rates:
            small, large = min(rates), max(rates)
            sentences.append(
                f"Without a codec, {shown_link(options)}: {format_bytes(small)} at {shown_rate(rates[small])}, "
                f"{format_bytes(large)} at {shown_rate(rates[large])}, {times(rates[large] / rates[small])} as fast; "
                f"the latency of a message is {transfer['latency_s'] * 1e6:.0f} µs."
            )
        timed = [codec for codec in measured if codec.rate is not None and codec.plain_rate is not None]
        ordered = sorted(timed, key=lambda codec: codec.rate or 0.0, reverse=True)
        if ordered:
            text = joined(f"{codec.codec} {shown_rate(codec.rate or 0.0)}" for codec in ordered)
            sentences.append(
                f"{options['recipes'][task].shown_data}, a tensor of {format_bytes(transfer['raw_bytes'])} end to end, "
                f"including encoding and decoding: {text}."
            )
    return tuple(sentences)


def _break_even(options: Mapping[str, Any], codecs: Codecs) -> Iterator[str]:
    for task, measured in codecs.items():
        compressing = [codec for codec in measured if codec.raw_bytes and codec.codec != "none"]
        if not compressing:
            continue
        ordered = sorted(compressing, key=lambda codec: codec.break_even_rate, reverse=True)
        useful = [codec for codec in ordered if codec.break_even_rate > 0]
        if useful:
            text = joined(
                f"{codec.codec} {shown_rate(codec.break_even_rate)}" for codec in useful if codec.break_even_rate < 1e12
            )
            yield f"{options['recipes'][task].shown_data}: each codec saves time on links slower than this: {text}."
        rate = next((codec.plain_rate for codec in measured if codec.plain_rate is not None), None)
        if rate is not None:
            here = [codec.codec for codec in useful if codec.break_even_rate > rate]
            yield (
                f"On this machine's link ({shown_rate(rate)}), "
                + (f"{joined(here)} would save time." if here else "no codec saves time: use none.")
            )
