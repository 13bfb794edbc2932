"""The answers of the study *fabric*: sentences made of its numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stagewright.quantity import format_bytes, format_s
from stagewright.studies.framework.phrases import joined, percent, times
from stagewright.studies.framework.study import Answer, Results

__all__ = ["QUESTIONS", "answers", "is_right", "sent_runs"]

QUESTIONS = (
    "What is sent, and over what?",
    "How long does each layer take?",
    "How long is the tail?",
    "What causes it?",
    "What do the buckets of a larger model cost?",
    "Is it as was published?",
)
_PUBLISHED_S = 0.02
"""Published for these layers on an emulated fabric: often this and more, with a tail to 4 and 12 s."""
_NOT_KNOWN = ("Not known: nothing was sent.",)


def sent_runs(
    results: Mapping[str, Any], options: Mapping[str, Any]
) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """(model, its name in parts, network, what was found) of everything that was sent."""
    for model, plain, network in options["sent"]:
        row = results.get(f"sent-{plain}-{network}")
        if row is not None and row["trials"]:
            yield model, plain, network, row


def is_right(row: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether the verdict names what was made."""
    verdict = row["verdict"]
    wanted = ("none", None) if row["made"] == "clean" else (row["made"], options["wrong_host"])
    return (verdict["kind"], verdict["rank"]) == wanted


def answers(results: Results, options: Mapping[str, Any]) -> tuple[Answer, ...]:
    """One for each question."""
    found = (
        _sent(results, options),
        _layers(results, options),
        _tails(results, options),
        _causes(results, options),
        _buckets(results, options),
        _published(results, options),
    )
    return tuple(
        Answer(question=question, sentences=sentences or _NOT_KNOWN)
        for question, sentences in zip(QUESTIONS, found, strict=True)
    )


def _sent(results: Results, options: Mapping[str, Any]) -> tuple[str, ...]:
    sentences = []
    for model in dict.fromkeys(model for model, *_ in sent_runs(results, options)):
        row = next(row for one, _, _, row in sent_runs(results, options) if one == model)
        sizes = joined(f"{layer['name']} {layer['bytes']}" for layer in row["layers"])
        total = sum(layer["bytes"] for layer in row["layers"])
        sentences.append(f"{model}: {sizes} bytes, in this order, {format_bytes(total)} a step.")
    if not sentences:
        return ()
    if options["where"] == "lab":
        sentences.append(
            f"They travel between {options['hosts']} emulated hosts, each on a link of {options['rate']}; in turn host "
            f"{options['wrong_host']} has a link of {options['slow_rate']}, loses {options['loss']} of the packets, or "
            f"is {format_s(options['late_s'])} late."
        )
    else:
        sentences.append(
            "A lab needs root, so everything was sent over this host's loopback: what stands here is what the host "
            "itself costs, and links could not be made slow or lossy."
        )
    return tuple(sentences)


def _layers(results: Results, options: Mapping[str, Any]) -> tuple[str, ...]:
    sentences = []
    for model, _, network, row in sent_runs(results, options):
        if model != options["model"]:
            continue
        known = [layer for layer in row["layers"] if layer["p50_s"] is not None]
        if not known:
            continue
        texts = joined(f"{layer['name']} {format_s(layer['p50_s'])}" for layer in known)
        step = row["total"]["p50_s"]
        sentences.append(
            f"{network}, {row['trials']} trials, half of them at most: {texts}"
            + (f"; all of a step {format_s(step)}." if step is not None else ".")
        )
    return tuple(sentences)


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _tail(layer: Mapping[str, Any]) -> float:
    return float(layer["max_s"] / layer["p50_s"]) if layer["p50_s"] else 0.0


def _tails(results: Results, options: Mapping[str, Any]) -> tuple[str, ...]:
    sentences = []
    for model, _, network, row in sent_runs(results, options):
        if model != options["model"]:
            continue
        worst = max(row["layers"], key=_tail)
        if not worst["p50_s"]:
            continue
        beside = f", one in a hundred {format_s(worst['p99_s'])} or more" if worst["p99_s"] is not None else ""
        sentences.append(
            f"{network}: longest beside its median is {worst['name']}, {format_s(worst['max_s'])} against "
            f"{format_s(worst['p50_s'])}, {times(_tail(worst))}{beside}; "
            f"{_counted(worst['retransmits'], 'segment')} sent again."
        )
    return tuple(sentences)


def _causes(results: Results, options: Mapping[str, Any]) -> tuple[str, ...]:
    sentences = []
    right = []
    for model, _, network, row in sent_runs(results, options):
        good = is_right(row, options)
        right.append(good)
        made = "nothing is wrong" if network == "clean" else f"{network} of host {options['wrong_host']}"
        longest = max(row["layers"], key=lambda layer: layer["max_s"])
        looks = "".join(f" {longest['name']}, the longest: {mode['sentence']}." for mode in longest["modes"][:1])
        sentences.append(
            f"{model}, {made}: “{row['verdict']['sentence']}”, "
            f"which is {'right' if good else 'not what was made'}.{looks}"
        )
    if right:
        sentences.append(f"Right in {sum(right)} of {len(right)}.")
    return tuple(sentences)


def _buckets(results: Results, options: Mapping[str, Any]) -> tuple[str, ...]:
    sentences = []
    for model, _, network, row in sent_runs(results, options):
        if model == options["model"]:
            continue
        total = sum(layer["bytes"] for layer in row["layers"])
        step, ideals = row["total"]["p50_s"], [layer["ideal_s"] for layer in row["layers"]]
        if step is None:
            step = row["total"]["mean_s"]
        text = (
            f"{model}, {network}: {_counted(len(row['layers']), 'bucket')}, {format_bytes(total)}, "
            f"{format_s(step)} a step over {row['trials']} trials"
        )
        if ideals and None not in ideals and sum(ideals):
            text += f", {percent(sum(ideals) / step)} of the ideal's speed ({format_s(sum(ideals))})"
        sentences.append(text + ".")
    return tuple(sentences)


def _published(results: Results, options: Mapping[str, Any]) -> tuple[str, ...]:
    sentences = []
    for model, _, network, row in sent_runs(results, options):
        if model != options["model"]:
            continue
        every = [value for times_s in row["times_s"] for value in times_s]
        if not every:
            continue
        share = sum(value >= _PUBLISHED_S for value in every) / len(every)
        sentences.append(
            f"{network}: {percent(share)} of the messages take 20 ms or more, the longest {format_s(max(every))}."
        )
    if sentences:
        sentences.append(
            "Published for these layers on an emulated fabric: often 20 ms and more, a tail to 4 and 12 s."
        )
    return tuple(sentences)
