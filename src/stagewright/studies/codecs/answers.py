"""Answers of the study *codecs*, in sentences with their numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stagewright.quantity import format_bytes
from stagewright.studies.codecs.measured import (
    BITS,
    GOAL_RATIO,
    Codecs,
    MeasuredCodec,
    collapse_verdict,
    faster_here,
    goal_points,
    kept_accuracy,
    may_collapse,
    part_name,
    shown_points,
    task_scale,
    without_codec,
)
from stagewright.studies.codecs.tables import rates_by_size, shown_link, shown_rate, shown_shape
from stagewright.studies.framework.accuracy import AccuracyScale
from stagewright.studies.framework.phrases import joined, percent
from stagewright.studies.framework.study import Answer, Results, answer_all
from stagewright.studies.parts.training_recipe import TrainingRecipe

QUESTIONS = (
    "What crosses the links?",
    "What does each codec cost in accuracy?",
    "How few bytes keep the accuracy?",
    "Which codecs collapse: sort quantization at 4 bits, Stagewright's?",
    "What is the compression ratio?",
    "What is the transfer rate, and how does it depend on the size?",
    "On which links does a codec save time?",
)
EVIDENCE: Mapping[str, tuple[str, ...]] = {
    QUESTIONS[1]: ("Codecs",),
    QUESTIONS[5]: ("Transfers by size",),
    QUESTIONS[6]: ("Error and time",),
}
"""Beginnings of the titles and names of the tables and figures behind each answer."""
_COLLAPSE_WORDS = {"yes": "collapse", "no": "no collapse", "unclear": "inconclusive"}


def answers(results: Results, options: Mapping[str, Any], codecs: Codecs) -> tuple[Answer, ...]:
    replies = (
        _crossing(results, options),
        _accuracy(results, options, codecs),
        _fewest_bytes(results, options, codecs),
        _collapse(results, options, codecs),
        _ratios(codecs),
        _transfer_rates(results, options, codecs),
        _break_even(results, options, codecs),
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
            f"with the gradients sent back {format_bytes(raw)} per step."
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
        if task == "digits":
            yield (
                "These are the embedded digits, not the published data sets: --tasks names those, with --data-dir DATA."
            )


def _not_judged(scale: AccuracyScale, reference: MeasuredCodec) -> str:
    """Why no codec can be judged; empty if the training without a codec learned."""
    if scale.has_learned(reference):
        return ""
    return (
        f"the training without a codec reached {scale.shown(reference)}, guessing reaches {scale.chance:g}: too little "
        "was learned to judge codecs; use more --epochs or --samples"
    )


def _accuracy(results: Results, options: Mapping[str, Any], codecs: Codecs) -> Iterator[str]:
    if not options["epochs"]:
        yield "Nothing was trained, since epochs is 0."
        return
    for task, measured in codecs.items():
        yield from _parity(results, options, task)
        reference, name = without_codec(measured), options["recipes"][task].shown_data
        if reference is None:
            yield f"{name}: unknown, since the training without a codec is missing."
            continue
        scale = task_scale(results, options, task, measured)
        reason = _not_judged(scale, reference)
        if reason:
            yield f"{name}: {reason}."
            continue
        judged = f" on {scale.num_judged} samples" if scale.num_judged else ""
        yield (
            f"{name}: without a codec {scale.shown(reference)} (95 % interval{judged}; guessing reaches "
            f"{scale.chance:g})."
        )
        limit = goal_points(task)
        texts: dict[str, list[str]] = {"keeps": [], "loses": [], "unclear": []}
        for codec in measured:
            if codec.mean is None or codec is reference:
                continue
            text = f"{codec.codec} {scale.difference(codec, reference).shown}"
            texts[scale.compare(codec, reference, limit)].append(text)
        points = shown_points(limit)
        if texts["keeps"]:
            yield f"At most {points} below it, interval of the difference included: {joined(texts['keeps'])}."
        if texts["loses"]:
            yield f"Below it by more than the interval: {joined(texts['loses'])}."
        if texts["unclear"]:
            more = "more seeds" if scale.num_judged is None or scale.num_judged > 5000 else "more --samples and --seeds"
            yield (
                f"Inconclusive, since the interval contains both no loss and one of more than {points}: "
                f"{joined(texts['unclear'])}; use {more}."
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


def _fewest_bytes(results: Results, options: Mapping[str, Any], codecs: Codecs) -> Iterator[str]:
    for task, measured in codecs.items():
        reference, name = without_codec(measured), options["recipes"][task].shown_data
        limit = goal_points(task)
        if reference is None:
            continue
        scale = task_scale(results, options, task, measured)
        reason = _not_judged(scale, reference)
        if reason:
            yield f"{name}: inconclusive: {reason}."
            continue
        trained = [codec for codec in measured if codec.mean is not None and codec is not reference and codec.raw_bytes]
        verdicts = {codec.codec: scale.compare(codec, reference, limit) for codec in trained}
        by_ratio = sorted(trained, key=lambda codec: codec.ratio)
        good = [codec for codec in by_ratio if verdicts[codec.codec] == "keeps"]
        unclear = [codec for codec in by_ratio if verdicts[codec.codec] == "unclear"]
        within = f"within {shown_points(limit)} of the accuracy without a codec"
        if good:
            best = good[0]
            yield (
                f"{name}: {best.codec} stays {within}, interval included, with {percent(best.ratio)} of the bytes "
                f"({scale.shown(best)} instead of {scale.shown(reference)}); {_goal(best, unclear)}."
            )
        fewer = [codec for codec in unclear if not good or codec.ratio < good[0].ratio]
        if fewer:
            texts = joined(f"{codec.codec} ({percent(codec.ratio)} of the bytes)" for codec in fewer)
            yield f"{name}: inconclusive for {texts}: it may be {within} or not."
        elif not good:
            yield f"{name}: none of these codecs stays {within}."


def _goal(best: MeasuredCodec, unclear: Sequence[MeasuredCodec]) -> str:
    """Whether the goal for bytes is met; open as long as a codec that is small enough may keep the accuracy."""
    if best.ratio <= GOAL_RATIO:
        return f"the goal of {GOAL_RATIO:g} is met"
    if any(codec.ratio <= GOAL_RATIO for codec in unclear):
        return f"whether the goal of {GOAL_RATIO:g} is met is inconclusive"
    return f"the goal of {GOAL_RATIO:g} is missed"


def _collapse(results: Results, options: Mapping[str, Any], codecs: Codecs) -> Iterator[str]:
    for task, measured in codecs.items():
        recipe: TrainingRecipe = options["recipes"][task]
        reference = without_codec(measured)
        if reference is None or reference.mean is None:
            continue
        scale = task_scale(results, options, task, measured)
        reason = _not_judged(scale, reference)
        if reason:
            yield f"{recipe.shown_data}: inconclusive: {reason}."
            continue
        texts: dict[str, list[str]] = {}
        for codec in measured:
            if codec is reference or not may_collapse(codec):
                continue
            kept, _ = kept_accuracy(scale, codec, reference)
            verdict = _COLLAPSE_WORDS[collapse_verdict(scale, codec, reference)]
            name = f"{codec.codec} ({BITS[codec.codec]} bits)" if codec.codec in BITS else codec.codec
            texts.setdefault(verdict, []).append(f"{name} keeps {percent(max(0.0, kept))}")
        if not texts:
            yield f"{recipe.shown_data}: unknown, since no codec of 8 bits or fewer was trained."
            continue
        yield (
            f"{recipe.shown_data}: a codec collapses if less than half of the accuracy above guessing is left. "
            + " ".join(f"{verdict.capitalize()}: {joined(names)}." for verdict, names in sorted(texts.items()))
        )


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
            sentences.append(
                f"Without a codec, {shown_link(options)}: the latency of a message is "
                f"{transfer['latency_s'] * 1e6:.0f} µs. {rates_by_size(rates)}"
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


def _break_even(results: Results, options: Mapping[str, Any], codecs: Codecs) -> Iterator[str]:
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
            here, because = faster_here(results, measured)
            yield (
                f"On this machine's link, measured end to end ({shown_rate(rate)} without a codec, latency included): "
                + (
                    f"inconclusive, since {because}."
                    if because
                    else f"{joined(here)} {'saves' if len(here) == 1 else 'save'} time."
                    if here
                    else "no codec saves time beyond the variation between runs: use none."
                )
            )
