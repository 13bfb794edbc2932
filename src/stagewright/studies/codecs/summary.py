"""The study *codecs* in four sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stagewright.studies.codecs.measured import (
    BITS,
    GOAL_RATIO,
    Codecs,
    MeasuredCodec,
    collapse_verdict,
    faster_here,
    goal_points,
    may_collapse,
    task_scale,
    without_codec,
)
from stagewright.studies.codecs.tables import rates_by_size, shown_rate, shown_shape
from stagewright.studies.framework.phrases import joined, percent
from stagewright.studies.framework.study import Results, Summary


def summarize(results: Results, options: Mapping[str, Any], codecs: Codecs) -> Summary:
    compressing = [
        codec for measured in codecs.values() for codec in measured if codec.raw_bytes and codec.codec != "none"
    ]
    if not compressing:
        return Summary(
            measured="No codec was measured.",
            ideal=f"{percent(GOAL_RATIO)} of the bytes without losing accuracy.",
            why="Unknown: nothing was measured.",
            advice="See which parts failed, and run the same command again.",
        )
    smallest = min(compressing, key=lambda codec: codec.ratio)
    fewest = f"{smallest.codec} sends the fewest bytes, {percent(smallest.ratio)} of fp32."
    return Summary(
        measured=" ".join(
            (
                *_crossing(results, options),
                f"{fewest}{_sort_ratios(compressing)}",
                *(_accuracy(results, options, task, measured) for task, measured in codecs.items()),
                *(_collapses(results, options, task, measured) for task, measured in codecs.items()),
            )
        ).rstrip(),
        ideal=f"{percent(GOAL_RATIO)} of the bytes within {_limits(codecs)} of the accuracy without a codec, and a "
        "time to encode and decode that is less than the link saves.",
        why=f"{_why(codecs)}{_rates_by_size(results, options)}",
        advice=_advice(results, codecs),
    )


def _crossing(results: Results, options: Mapping[str, Any]) -> Iterator[str]:
    """Which tensors cross the links."""
    for task, recipe in options["recipes"].items():
        crossing = results.get(f"crossing-{task}")
        if crossing is not None:
            shapes = joined(shown_shape(shape) for row in crossing["shapes"] for shape in row)
            yield f"{recipe.model} on {recipe.shown_data} sends {shapes}, and their gradients back."


def _sort_ratios(compressing: Sequence[MeasuredCodec]) -> str:
    """The bytes of sort quantization, which was published."""
    ratios = {BITS[codec.codec]: percent(codec.ratio) for codec in compressing if codec.codec in BITS}
    if not ratios:
        return ""
    bits = joined(map(str, ratios))
    return f" Sort quantization with {bits} bits sends {joined(ratios.values())}."


def _collapses(results: Results, options: Mapping[str, Any], task: str, measured: Sequence[MeasuredCodec]) -> str:
    """Which codecs of few bits collapse; "" where too little was learned, which the accuracy says."""
    reference, scale = without_codec(measured), task_scale(results, options, task, measured)
    few = [codec for codec in measured if may_collapse(codec)]
    if reference is None or not few or not scale.has_learned(reference):
        return ""
    verdicts = {codec.codec: collapse_verdict(scale, codec, reference) for codec in few}
    names = [codec for codec, verdict in verdicts.items() if verdict == "yes"]
    unclear = [codec for codec, verdict in verdicts.items() if verdict == "unclear"]
    verb = "collapses" if len(names) == 1 else "collapse"
    collapsed = f"{joined(names)} {verb}" if names else "no codec collapses"
    return f"With 8 bits and fewer {collapsed}{f'; inconclusive for {joined(unclear)}' if unclear else ''}."


def _rates_by_size(results: Results, options: Mapping[str, Any]) -> str:
    """How the transfer rate depends on the size."""
    transfers = (results.get(f"transfer-{task}") for task in options["recipes"])
    sizes: Mapping[str, float] = next(
        (transfer["sizes"] for transfer in transfers if transfer is not None and transfer["sizes"]), {}
    )
    if len(sizes) < 2:
        return ""
    rates = {int(size): int(size) / max(seconds, 1e-9) for size, seconds in sizes.items()}
    return f" {rates_by_size(rates)}"


def _limits(codecs: Codecs) -> str:
    limits = dict.fromkeys(f"{goal_points(task):g}" for task in codecs)
    return f"{joined(limits, 'or')} point{'' if list(limits) == ['1'] else 's'}"


def _accuracy(results: Results, options: Mapping[str, Any], task: str, measured: Sequence[MeasuredCodec]) -> str:
    name = options["recipes"][task].shown_data
    reference = without_codec(measured)
    if reference is None:
        return f"{name}: no accuracy was measured."
    scale = task_scale(results, options, task, measured)
    if not scale.has_learned(reference):
        return f"{name}: too little was learned to judge codecs ({scale.shown(reference)}, guessing {scale.chance:g})."
    verdicts: dict[str, list[str]] = {}
    for codec in measured:
        if codec is not reference and codec.mean is not None:
            verdicts.setdefault(scale.compare(codec, reference, goal_points(task)), []).append(codec.codec)
    words = {
        "keeps": ("keeps the accuracy", "keep the accuracy"),
        "loses": ("loses accuracy", "lose accuracy"),
        "unclear": ("is inconclusive", "are inconclusive"),
    }
    texts = [
        f"{joined(verdicts[verdict])} {singular if len(verdicts[verdict]) == 1 else plural}"
        for verdict, (singular, plural) in words.items()
        if verdict in verdicts
    ]
    return f"{name}, {scale.shown(reference)} without a codec: {'; '.join(texts)}."


def _why(codecs: Codecs) -> str:
    measured = next(iter(codecs.values()))
    timed = sorted(
        (codec for codec in measured if codec.raw_bytes and codec.codec_s > 0), key=lambda codec: codec.break_even_rate
    )
    if not timed:
        return "Unknown: no codec was timed."
    slow, fast = timed[0], timed[-1]
    return (
        f"Fewer bits send fewer bytes, but encoding and decoding take time: {fast.codec} saves time on links below "
        f"{shown_rate(fast.break_even_rate)}, {slow.codec} only below {shown_rate(slow.break_even_rate)}."
    )


def _advice(results: Results, codecs: Codecs) -> str:
    measured = next(iter(codecs.values()))
    rate = next((codec.plain_rate for codec in measured if codec.plain_rate is not None), None)
    useful, because = faster_here(results, measured)
    fastest = max(
        (codec for codec in measured if codec.codec != "none" and codec.raw_bytes),
        key=lambda codec: codec.break_even_rate,
        default=None,
    )
    if rate is None or fastest is None:
        return "Measure the link first: stagewright study codecs --epochs 0."
    here = "Between these workers " + (
        f"it is inconclusive whether a codec saves time, since {because}"
        if because
        else f"use {joined(useful, 'or')}: a tensor arrives sooner"
        if useful
        else "send without a codec: none of them makes a tensor arrive measurably sooner"
    )
    return (
        f"{here}. On slower links take the codec with the fewest bytes that keeps the accuracy of your task, if the "
        "link is slower than its rate in the table “Error and time of each codec”."
    )
