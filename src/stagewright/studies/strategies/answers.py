"""The answers of the study *strategies*: sentences made of its numbers. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from stagewright.quantity import format_bytes
from stagewright.studies.framework.phrases import joined, spread, times
from stagewright.studies.parts.training_recipe import Lesson
from stagewright.studies.framework.study import Answer, Results
from stagewright.studies.strategies.measured import PUBLISHED_LARGE, MeasuredWay
from stagewright.studies.strategies.tables import baseline, large_rows

__all__ = ["QUESTIONS", "answers"]

Ways = Mapping[str, Sequence[MeasuredWay]]

QUESTIONS = (
    "What was learned?",
    "Pipeline or data parallel: which is faster?",
    "Is the accuracy of a pipeline that of data parallel?",
    "What do more micro-batches change?",
    "Cut evenly, or first and last units at a client?",
    "What do more workers give?",
    "What runs out of memory under data parallel and still runs as a pipeline?",
)
_NOT_KNOWN = ("Not known: nothing was measured.",)


def answers(results: Results, options: Mapping[str, Any], ways: Ways) -> tuple[Answer, ...]:
    """One for each question."""
    found = (
        _lessons(results, options),
        _faster(options, ways),
        _accuracy(options, ways),
        _pieces(options, ways),
        _cuts(results, options, ways),
        _workers(options, ways),
        _large(results, options),
    )
    return tuple(
        Answer(question=question, sentences=sentences or _NOT_KNOWN)
        for question, sentences in zip(QUESTIONS, found, strict=True)
    )


def _lessons(results: Results, options: Mapping[str, Any]) -> tuple[str, ...]:
    sentences = []
    for task, lesson in options["lessons"].items():
        samples = results.get(f"data-{task}")
        taken = (
            f"{samples['train']} of {samples['of'][0]} samples, judged by {samples['judged']} of {samples['of'][1]}"
            if samples is not None and samples["of"] is not None
            else "all samples"
        )
        weights = "pretrained" if lesson.weights else "random"
        size = f" at {lesson.size} {'tokens' if lesson.kind == 'bert' else 'pixels'}" if lesson.size else ""
        epochs = f"{options['epochs']} epoch{'s' if options['epochs'] != 1 else ''}"
        seeds = f"{len(options['seeds'])} seed{'s' if len(options['seeds']) != 1 else ''}"
        sentences.append(
            f"{lesson.shown_data} by {lesson.model}{size}: {taken}, {epochs}, {seeds}, from {weights} weights."
        )
        if task == "digits" and options["data"] is None:
            sentences.append("No data was given: these are the embedded digits, not what was published.")
    return tuple(sentences)


def _told(one: MeasuredWay) -> str:
    text = f"{one.way.shown} {times(one.speedup or 0.0)}"
    return text + (f" ({spread(one.speedups)})" if len(one.speedups) > 1 else "")


def _faster(options: Mapping[str, Any], ways: Ways) -> tuple[str, ...]:
    sentences = []
    for task, every in ways.items():
        name = options["lessons"][task].shown_data
        for count in options["workers"]:
            mine = [one for one in every if one.way.workers == count and one.speedup is not None]
            data = next((one for one in mine if one.way.strategy == "data"), None)
            pipelines = [one for one in mine if one.way.strategy == "pipeline"]
            # A client has its own question.
            pipelines = [one for one in pipelines if one.way.cut == "even"] or pipelines
            if data is None or not pipelines:
                continue
            best = max(pipelines, key=lambda one: one.speedup or 0.0)
            how = "measured" if data.is_measured and best.is_measured else "forecast, with a device for each worker"
            sentences.append(
                f"{name}, {count} workers, {how}: {_told(data)}, {_told(best)} with {best.way.microbatches} "
                f"micro-batches. {_verdict(data, best)}"
            )
    above = [
        one
        for every in ways.values()
        for one in every
        if one.is_measured and one.speedup is not None and one.speedup > one.way.workers
    ]
    if above:
        texts = joined(f"{one.way.shown} {times(one.speedup or 0.0)} on {one.way.workers}" for one in above)
        sentences.append(
            f"More than the workers can give: {texts}. Either a share of the batch runs better than all of it does, or "
            "something else used this machine while serial was timed: more --rounds tell."
        )
    if sentences:
        sentences.append(
            "Published, on 2 GPUs: the pipeline has 0.61 (CIFAR-10) and 0.80 (RTE) of data parallel's speed; on 4 it "
            "is slower on CIFAR-10 (1.07 against 1.66) and faster on RTE (1.40 against 1.25)."
        )
    return tuple(sentences)


def _verdict(data: MeasuredWay, best: MeasuredWay) -> str:
    """Which is faster; from three rounds on, whether it was in each of them, where both had the same serial."""
    ratio = (best.speedup or 0.0) / (data.speedup or 1.0)
    rounds = len(data.speedups)
    if rounds == len(best.speedups) > 2:
        ratios = [one / other for one, other in zip(best.speedups, data.speedups, strict=True)]
        if max(ratios) < 1 or min(ratios) > 1:
            faster = "The pipeline" if min(ratios) > 1 else "Data parallel"
            return (
                f"{faster} is faster in each of {rounds} rounds: {times(statistics.median(ratios))} "
                f"({spread(ratios)}) is the pipeline over data."
            )
        return "They are no more apart than two runs of one are."
    if rounds > 1 and len(best.speedups) > 1:
        apart = min(data.speedups) > max(best.speedups) or max(data.speedups) < min(best.speedups)
    else:
        apart = abs(ratio - 1) >= 0.05
    if not apart:
        return "They are no more apart than two runs of one are."
    return f"{'The pipeline' if ratio > 1 else 'Data parallel'} is faster: {ratio:.2f} × is the pipeline over data."


def _accuracy(options: Mapping[str, Any], ways: Ways) -> tuple[str, ...]:
    sentences = []
    for task, every in ways.items():
        name = options["lessons"][task].shown_data
        for count in options["workers"]:
            mine = [one for one in every if one.way.workers == count and one.mean is not None]
            data = next((one for one in mine if one.way.strategy == "data"), None)
            pipelines = [one for one in mine if one.way.strategy == "pipeline"]
            if data is None or not pipelines:
                continue
            assert data.mean is not None
            texts = []
            outside = []
            for one in pipelines:
                assert one.mean is not None
                label = f"{one.way.shown} ({one.way.microbatches})"
                texts.append(f"{label} {one.shown_accuracy}")
                if abs(one.mean - data.mean) > 2 * max(data.deviation or 0.0, one.deviation or 0.0):
                    outside.append((label, one.mean - data.mean))
            text = f"{name}, {count} workers: data {data.shown_accuracy}, {joined(texts)}."
            if data.deviation is None:
                text += " With one seed their spread is not known."
            elif not outside:
                text += " All are within twice the spread over seeds: no difference is shown."
            else:
                moved = joined(f"{label} by {points:+.1f}".replace("-", "−") for label, points in outside)
                text += f" Outside of twice the spread over seeds: {moved} points."
            sentences.append(text)
    return tuple(sentences)


def _pieces(options: Mapping[str, Any], ways: Ways) -> tuple[str, ...]:
    sentences = []
    for task, every in ways.items():
        for count in options["workers"]:
            mine = [
                one for one in every if one.way.workers == count and one.way.cut == "even" and one.speedup is not None
            ]
            if len(mine) < 2:
                continue
            how = "measured" if all(one.is_measured for one in mine) else "forecast"
            rates = joined(f"{one.way.microbatches} give {times(one.speedup or 0.0)}" for one in mine)
            most = times(max(one.speedup or 0.0 for one in mine))
            best = joined(str(one.way.microbatches) for one in mine if times(one.speedup or 0.0) == most)
            sentences.append(
                f"{options['lessons'][task].shown_data}, {count} workers ({how}): {rates}; best are {best}: more of "
                "them fill the pipeline better, smaller ones run less well."
            )
    if not sentences and len(options["microbatches"]) < 2:
        return ("Only one number of micro-batches was studied.",)
    return tuple(sentences)


def _cuts(results: Results, options: Mapping[str, Any], ways: Ways) -> tuple[str, ...]:
    sentences = []
    for task, every in ways.items():
        cuts = (results.get(f"profile-{task}") or {"cuts": {}})["cuts"]
        evenly = {one.way.microbatches: one for one in every if one.way.cut == "even" and one.way.workers == 2}
        sentences += [
            f"{options['lessons'][task].shown_data}, {one.way.microbatches} micro-batches: "
            + _beside(one, evenly.get(one.way.microbatches), cuts.get(one.way.name, ()))
            for one in every
            if one.way.cut == "client" and one.speedup is not None
        ]
    if sentences:
        sentences.append("Published: 0.61 of data parallel's speed by the rule, 0.85 cut evenly; 1641 and 5039 MiB.")
    elif len(options["cuts"]) < 2:
        return ("Only one way to cut was studied.",)
    return tuple(sentences)


def _beside(client: MeasuredWay, even: MeasuredWay | None, cuts: Sequence[str]) -> str:
    """Client and server beside an even cut with as many micro-batches."""
    where = f" (cut after {joined(cuts)})" if cuts else ""
    text = f"client and server reach {times(client.speedup or 0.0)}{where}"
    if even is not None and even.speedup is not None:
        text += f", an even cut {times(even.speedup)}"
    if len(client.peak_bytes) == 2:
        text += f"; the client needs {format_bytes(client.peak_bytes[0])}"
        text += f", the server {format_bytes(client.peak_bytes[1])}"
    if even is not None and len(even.peak_bytes) == 2:
        text += f", evenly cut {format_bytes(even.peak_bytes[0])} and {format_bytes(even.peak_bytes[1])}"
    return text + "."


def _workers(options: Mapping[str, Any], ways: Ways) -> tuple[str, ...]:
    sentences = []
    for task, every in ways.items():
        first = baseline(every)
        for count in options["workers"]:
            mine = [one for one in every if one.way.workers == count and one.samples_per_s is not None and one.equal]
            if count == 2 or not mine or first is None or not first.samples_per_s:
                continue
            rates = joined(
                f"{one.way.shown}{f' ({one.way.microbatches})' if one.way.cut else ''} "
                f"{(one.samples_per_s or 0.0) / first.samples_per_s:.2f}"
                for one in mine
            )
            how = "measured" if all(one.is_measured for one in mine) else "forecast, with a device for each worker"
            sentences.append(
                f"{options['lessons'][task].shown_data}, {count} workers, {how}, over data parallel on 2: {rates}."
            )
            if not all(one.is_measured for one in mine):
                devices = len(set(options["devices"]))
                shared = "1 device" if devices == 1 else f"{devices} devices"
                sentences.append(
                    f"Here {count} workers shared {shared} while they learned, so their own speed says "
                    "nothing; the accuracy is as good."
                )
    if not sentences and tuple(options["workers"]) == (2,):
        return ("Only 2 workers were studied.",)
    return tuple(sentences)


def _large(results: Results, options: Mapping[str, Any]) -> tuple[str, ...]:
    tried = large_rows(results, options)
    limit = results.get("large-limit")
    if not tried or limit is None:
        return ("Large batches were not studied.",) if not options["large_batches"] else _NOT_KNOWN
    lesson: Lesson = options["lessons"][options["tasks"][0]]
    ran = {(kind, batch): row["ran"] and row["equal"] for kind, batch, row in tried}
    sentences = []
    rescued = [
        batch
        for batch in options["large_batches"]
        if ran.get(("data", batch)) is False and ran.get(("pipeline", batch))
    ]
    held = f"{lesson.model} on two devices of {format_bytes(limit['memory_bytes'])}"
    sentences.append(
        f"{held}: batch {joined(str(batch) for batch in rescued)} runs out of memory under data parallel and runs as a "
        "pipeline."
        if rescued
        else f"{held}: no batch that was tried runs as a pipeline alone."
    )
    for kind, name in (("data", "data parallel"), ("pipeline", "the pipeline")):
        texts = [
            f"{batch} " + (f"({format_bytes(max(row['peak_memory_bytes']))})" if row["ran"] else "out of memory")
            for one, batch, row in tried
            if one == kind
        ]
        if texts:
            sentences.append(f"{name.capitalize()}: {joined(texts)}.")
    pieces = [batch for batch in rescued if ran.get(("accumulated", batch))]
    if pieces:
        sentences.append(
            f"Data parallel that takes its share in pieces of {options['piece']} samples and adds up gradients runs "
            f"{joined(str(batch) for batch in pieces)} too: it is the pieces that save the memory."
        )
    return (*sentences, PUBLISHED_LARGE)
